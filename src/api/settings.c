#include "api/settings.h"

#include "api/features.h"
#include "api/instance.h"
#include "api/options.h"
#include "api/report.h"
#include "arena/arena.h"
#include "os/purge.h"

#include <errno.h>

static void allow_vectored_purges(void) {
    purge_allow_vectored((enum purge_vectored)calm_options.vectored_purge);
}

/* Applies what must follow a new value immediately. Returns 0 or an errno.
 * Thread-safe. */
static int apply_option(enum option which) {
    if (which == OPTION_vectored_purge) {
        allow_vectored_purges();
    } else if (which == OPTION_report) {
        report_prepare();
    } else if (which == OPTION_profile) {
        heap_profile_learn_modules();
        return heap_profile_configure((uint64_t)calm_options.profile, calm_options.profile_file) ? 0 : ENOMEM;
    }
    return 0;
}

void settings_read(void) {
    options_read();
    allow_vectored_purges();
}

void settings_apply_profile(void) {
    if (!heap_profile_configure((uint64_t)calm_options.profile, calm_options.profile_file)) {
        text_write_line(2, "calmalloc: option 'profile' ignored: %s", HEAP_PROFILE_REFUSED);
    }
}

void settings_read_late(void) {
    if (options_read()) {
        allow_vectored_purges();
        arena_refresh(&calm_arenas); /* changes the limit on free memory */
        settings_apply_profile();
    }
    heap_profile_learn_modules(); /* a profile that another process requests starts within malloc */
    report_prepare();
}

int settings_set(const char *name, const char *value) {
    enum option which;
    int error = options_set(name, value, &which);
    error = error == 0 ? apply_option(which) : error;
    if (error == 0) {
        arena_refresh(&calm_arenas); /* changes the limit on free memory */
    }
    return error;
}
