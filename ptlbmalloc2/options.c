#include "options.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "os/text.h"

struct options options = {.sensitivity = 1};

static void complain(const char *name, const char *value, const char *wanted) {
    text_write_line(STDERR_FILENO, "ptlbmalloc2: %s='%s' ignored: %s", name, value, wanted);
}

static bool is_on(const char *value) {
    return value != NULL && strcmp(value, "1") == 0;
}

static bool is_off(const char *value) {
    return value == NULL || *value == '\0' || strcmp(value, "0") == 0;
}

static void read_sensitivity(const char *name) {
    const char *value = secure_getenv(name);
    if (value == NULL) {
        return;
    }
    char *end;
    double sensitivity = strtod(value, &end);
    if (end == value || *end != '\0' || !isfinite(sensitivity) || sensitivity <= 0) {
        complain(name, value, "a number above 0 is wanted");
    } else {
        options.sensitivity = sensitivity;
    }
}

static void read_stats(const char *name) {
    const char *value = secure_getenv(name);
    if (is_off(value)) {
        return;
    }
    bool to_file = strncmp(value, "json:", 5) == 0 && value[5] != '\0' && strlen(value + 5) < PATH_MAX;
    if (is_on(value)) {
        options.stats_format = STATS_TEXT;
    } else if (to_file || strcmp(value, "json") == 0) {
        options.stats_format = STATS_JSON;
    } else {
        complain(name, value, "1, json or json:FILE is wanted");
    }
    if (to_file) {
        memcpy(options.stats_path, value + 5, strlen(value + 5) + 1);
    }
}

static void read_placement(const char *name) {
    const char *value = secure_getenv(name);
    options.placement = is_on(value);
    if (!options.placement && !is_off(value)) {
        complain(name, value, "0 or 1 is wanted");
    }
}

void options_read(void) {
    read_sensitivity("PTLBMALLOC2_SENSITIVITY");
    read_stats("PTLBMALLOC2_STATS");
    read_placement("PTLBMALLOC2_PLACEMENT");
    options.verbose = is_on(secure_getenv("PTLBMALLOC2_VERBOSE"));
}
