#include "options.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "os/text.h"

/* By the name that every glibc has: the headers of 2.38 and later would have __isoc23_strtoul, and a library
 * built there could not be preloaded on an older system. */
unsigned long parse_number(const char *text, char **end, int base) __asm__("strtoul");

static void complain(const char *name, const char *value, const char *wanted) {
    struct text line = {0};
    text_string(&line, "ptlbmalloc2: ");
    text_string(&line, name);
    text_string(&line, "='");
    text_string(&line, value);
    text_string(&line, "' ignored: ");
    text_string(&line, wanted);
    text_string(&line, "\n");
    text_write(&line, 2);
}

/* What GLIBC_TUNABLES ("name=value:name=value") or else the older variable sets; NULL if neither does. */
static const char *glibc_setting(const char *tunable, const char *variable) {
    size_t length = strlen(tunable);
    const char *tunables = getenv("GLIBC_TUNABLES");
    while (tunables != NULL && *tunables != '\0') {
        if (strncmp(tunables, tunable, length) == 0 && tunables[length] == '=') {
            return tunables + length + 1;
        }
        tunables = strchr(tunables, ':');
        tunables = tunables == NULL ? NULL : tunables + 1;
    }
    return variable == NULL ? NULL : getenv(variable);
}

static bool is_on(const char *value) {
    return value != NULL && strcmp(value, "1") == 0;
}

static void read_sensitivity(struct options *options) {
    options->sensitivity = 1;
    const char *value = secure_getenv("PTLBMALLOC2_SENSITIVITY");
    if (value == NULL) {
        return;
    }
    char *end;
    double sensitivity = strtod(value, &end);
    if (end == value || *end != '\0' || !isfinite(sensitivity) || sensitivity <= 0) {
        complain("PTLBMALLOC2_SENSITIVITY", value, "a number above 0 is wanted");
        return;
    }
    options->sensitivity = sensitivity;
}

static void read_stats(struct options *options) {
    const char *value = secure_getenv("PTLBMALLOC2_STATS");
    if (value == NULL || *value == '\0' || strcmp(value, "0") == 0) {
        return;
    }
    if (is_on(value)) {
        options->stats_format = STATS_TEXT;
    } else if (strcmp(value, "json") == 0) {
        options->stats_format = STATS_JSON;
    } else if (strncmp(value, "json:", 5) == 0 && value[5] != '\0' && strlen(value + 5) < PATH_MAX) {
        options->stats_format = STATS_JSON;
        memcpy(options->stats_path, value + 5, strlen(value + 5) + 1);
    } else {
        complain("PTLBMALLOC2_STATS", value, "1, json or json:FILE is wanted");
    }
}

static void read_placement(struct options *options) {
    const char *value = secure_getenv("PTLBMALLOC2_PLACEMENT");
    if (value == NULL || *value == '\0' || strcmp(value, "0") == 0) {
        return;
    }
    options->placement = is_on(value);
    if (!options->placement) {
        complain("PTLBMALLOC2_PLACEMENT", value, "0 or 1 is wanted");
    }
}

void options_read(struct options *options) {
    memset(options, 0, sizeof *options);
    read_sensitivity(options);
    read_stats(options);
    read_placement(options);
    options->verbose = is_on(secure_getenv("PTLBMALLOC2_VERBOSE"));

    options->sets_trim_threshold =
        glibc_setting("glibc.malloc.trim_threshold", "MALLOC_TRIM_THRESHOLD_") != NULL;
    const char *mmap_threshold = glibc_setting("glibc.malloc.mmap_threshold", "MALLOC_MMAP_THRESHOLD_");
    options->sets_mmap_threshold = mmap_threshold != NULL;
    options->mmap_threshold = mmap_threshold != NULL ? parse_number(mmap_threshold, NULL, 0) : 0;
    options->sets_mmap_max = glibc_setting("glibc.malloc.mmap_max", "MALLOC_MMAP_MAX_") != NULL;
    options->sets_huge_pages = glibc_setting("glibc.malloc.hugetlb", NULL) != NULL;
    options->sets_tagging = glibc_setting("glibc.mem.tagging", NULL) != NULL;
    options->sets_check = glibc_setting("glibc.malloc.check", "MALLOC_CHECK_") != NULL;
    const char *top_pad = glibc_setting("glibc.malloc.top_pad", "MALLOC_TOP_PAD_");
    options->sets_top_pad = top_pad != NULL;
    options->top_pad = top_pad != NULL ? parse_number(top_pad, NULL, 0) : 0;
}
