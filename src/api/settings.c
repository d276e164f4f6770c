#include "api/settings.h"

#include "api/features.h"
#include "api/options.h"
#include "api/report.h"
#include "api/state.h"
#include "governor/governor.h"
#include "os/purge.h"

#include <errno.h>
#include <string.h>

/* Again, if another thread set it meanwhile: what is stored last is copied last. */
static void copy(_Atomic(int) *setting, const _Atomic(int) *value) {
    while (*setting != *value) {
        *setting = *value;
    }
}

/* Copies the option to the governor's settings, or does what else follows from its value. Returns 0 or an
 * errno. Thread-safe. */
static int apply_option(enum option which) {
    switch (which) {
#define NOWHERE(...)
#define GOVERNOR(name, field)                                    \
    case OPTION_##name:                                          \
        copy(&calm_governor.settings.field, &calm_options.name); \
        return 0;
#define OPTION(name, values, initial, change, place, field, ...) place(name, field)
#define TEXT_OPTION(...)
#include "api/options.def"
    case OPTION_vectored_purge:
        purge_allow_vectored((enum purge_vectored)calm_options.vectored_purge);
        return 0;
    case OPTION_report:
        report_prepare();
        return 0;
    case OPTION_profile:
        heap_profile_learn_modules();
        return heap_profile_configure((uint64_t)calm_options.profile, calm_options.profile_file) ? 0 : ENOMEM;
    default:
        return 0;
    }
}

static void apply_settings(void) {
    for (enum option which = 0; which < OPTION_COUNT; which++) {
        if (which != OPTION_report && which != OPTION_profile) {
            apply_option(which);
        }
    }
}

static void refresh(struct governor *governor, void *nothing) {
    (void)nothing;
    governor_refresh(governor);
}

/* The limit on free memory follows. */
static void refresh_all(void) {
    calm_allocator.backend->functions->run(calm_allocator.backend, refresh, NULL);
}

void settings_read(void) {
    options_read();
    apply_settings();
}

void settings_apply_profile(void) {
    if (!heap_profile_configure((uint64_t)calm_options.profile, calm_options.profile_file)) {
        text_write_line(2, "calmalloc: option 'profile' ignored: %s", HEAP_PROFILE_REFUSED);
    }
}

void settings_read_late(void) {
    if (options_read()) {
        apply_settings();
        refresh_all();
        settings_apply_profile();
    }
    heap_profile_learn_modules(); /* also for a profile that is requested from outside, within malloc */
    report_prepare();
}

int settings_set(const char *name, const char *value) {
    enum option which;
    int error = options_set(name, value, strlen(value), &which);
    error = error == 0 ? apply_option(which) : error;
    if (error == 0) {
        refresh_all();
    }
    return error;
}
