#include "glibc_layout.h"

#include <string.h>

#define WITH_FASTBINS    96
#define WITHOUT_FASTBINS 8

static const struct glibc_layout layouts[] = {
    {"2.31", WITH_FASTBINS, 32, 16},   {"2.32", WITH_FASTBINS, 32, 16}, {"2.33", WITH_FASTBINS, 32, 16},
    {"2.34", WITH_FASTBINS, 32, 16},   {"2.35", WITH_FASTBINS, 48, 16}, {"2.36", WITH_FASTBINS, 48, 16},
    {"2.37", WITH_FASTBINS, 48, 16},   {"2.38", WITH_FASTBINS, 48, 16}, {"2.39", WITH_FASTBINS, 48, 16},
    {"2.40", WITH_FASTBINS, 48, 16},   {"2.41", WITH_FASTBINS, 48, 16}, {"2.42", WITH_FASTBINS, 48, 16},
    {"2.43", WITHOUT_FASTBINS, 48, 8},
};

struct glibc_layout glibc_layout = {"", WITH_FASTBINS, HEAP_HEADER_WITH_PAGESIZE, 16};
struct arena *glibc_main_arena;

bool glibc_layout_choose(const char *version) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        if (strcmp(layouts[i].version, version) == 0) {
            glibc_layout = layouts[i];
            return true;
        }
    }
    glibc_layout.mmapped_overhead_bytes = 8; /* as in the newest known version */
    return false;
}
