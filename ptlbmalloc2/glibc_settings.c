#include "glibc_settings.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

#include "glibc_layout.h"
#include "numbers.h"

/* By the name that every glibc has: the headers of 2.38 and later would have __isoc23_strtoul, and a library
 * built there could not be preloaded on an older system. */
unsigned long parse_number(const char *text, char **end, int base) __asm__("strtoul");

struct glibc_settings glibc_settings = {.mmap_threshold_bytes = DEFAULT_MMAP_THRESHOLD};

/* What GLIBC_TUNABLES ("name=value:name=value") or else the older variable sets; NULL if neither does. */
static const char *glibc_settings_find(const char *tunable, const char *variable) {
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

void glibc_settings_read(void) {
    static const struct {
        const char *tunable, *variable;
        int parameter;
    } numbers[] = {
        {"glibc.malloc.trim_threshold", "MALLOC_TRIM_THRESHOLD_", M_TRIM_THRESHOLD},
        {"glibc.malloc.top_pad", "MALLOC_TOP_PAD_", M_TOP_PAD},
        {"glibc.malloc.mmap_threshold", "MALLOC_MMAP_THRESHOLD_", M_MMAP_THRESHOLD},
        {"glibc.malloc.mmap_max", "MALLOC_MMAP_MAX_", M_MMAP_MAX},
    };
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++) {
        const char *value = glibc_settings_find(numbers[i].tunable, numbers[i].variable);
        if (value == NULL) {
            continue;
        }
        glibc_settings_note(numbers[i].parameter, parse_number(value, NULL, 0));
        if (numbers[i].parameter == M_MMAP_THRESHOLD) {
            STORE(&glibc_settings.mmap_threshold_bytes, parse_number(value, NULL, 0));
        }
    }
    glibc_settings.huge_pages = glibc_settings_find("glibc.malloc.hugetlb", NULL) != NULL;
    glibc_settings.tagging = glibc_settings_find("glibc.mem.tagging", NULL) != NULL;
    glibc_settings.check = glibc_settings_find("glibc.malloc.check", "MALLOC_CHECK_") != NULL;
}

void glibc_settings_note(int parameter, size_t value) {
    if (parameter == M_TOP_PAD) {
        STORE(&glibc_settings.top_pad_bytes, value);
        atomic_store(&glibc_settings.top_pad, true);
    } else if (parameter == M_TRIM_THRESHOLD) {
        STORE(&glibc_settings.trim_threshold, true);
    } else if (parameter != M_MMAP_THRESHOLD && parameter != M_MMAP_MAX) {
        return;
    }
    STORE(&glibc_settings.mmap_threshold, true);
}

bool glibc_settings_raise_mmap_threshold(size_t chunk_bytes) {
    if (chunk_bytes <= LOAD(&glibc_settings.mmap_threshold_bytes) ||
        chunk_bytes > DEFAULT_MMAP_THRESHOLD_MAX || LOAD(&glibc_settings.mmap_threshold)) {
        return false;
    }
    STORE(&glibc_settings.mmap_threshold_bytes, chunk_bytes);
    return true;
}
