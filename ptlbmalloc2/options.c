#include "options.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "os/text.h"

struct options options = {.sensitivity = 1};

static bool is_on(const char *value) {
    return strcmp(value, "1") == 0;
}

static bool is_off(const char *value) {
    return *value == '\0' || strcmp(value, "0") == 0;
}

/* Each of these sets its option; false, and nothing set, for an invalid value. */

static bool set_sensitivity(const char *value) {
    char *end;
    double sensitivity = strtod(value, &end);
    bool valid = end != value && *end == '\0' && isfinite(sensitivity) && sensitivity > 0;
    options.sensitivity = valid ? sensitivity : options.sensitivity;
    return valid;
}

static bool set_stats(const char *value) {
    bool to_file = strncmp(value, "json:", 5) == 0 && value[5] != '\0' && strlen(value + 5) < PATH_MAX;
    if (to_file) {
        memcpy(options.stats_path, value + 5, strlen(value + 5) + 1);
    }
    options.stats_format = is_on(value)                            ? STATS_TEXT
                           : to_file || strcmp(value, "json") == 0 ? STATS_JSON
                                                                   : STATS_OFF;
    return options.stats_format != STATS_OFF || is_off(value);
}

static bool set_placement(const char *value) {
    options.placement = is_on(value);
    return options.placement || is_off(value);
}

static bool set_verbose(const char *value) {
    options.verbose = is_on(value);
    return true;
}

static void read_one(const char *name, bool (*set)(const char *value), const char *wanted) {
    const char *value = secure_getenv(name);
    if (value != NULL && !set(value)) {
        text_write_line(STDERR_FILENO, "ptlbmalloc2: %s='%s' ignored: %s is wanted", name, value, wanted);
    }
}

void ptlbmalloc2_options_read(void) {
    read_one("PTLBMALLOC2_SENSITIVITY", set_sensitivity, "a number above 0");
    read_one("PTLBMALLOC2_STATS", set_stats, "1, json or json:FILE");
    read_one("PTLBMALLOC2_PLACEMENT", set_placement, "0 or 1");
    read_one("PTLBMALLOC2_VERBOSE", set_verbose, "");
}
