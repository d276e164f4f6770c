#include "glibc_layout.h"

#include <string.h>

static const struct glibc_layout layouts[] = {
    {"2.31", 32}, {"2.32", 32}, {"2.33", 32}, {"2.34", 32}, {"2.35", 48}, {"2.36", 48},
    {"2.37", 48}, {"2.38", 48}, {"2.39", 48}, {"2.40", 48}, {"2.41", 48}, {"2.42", 48},
};

const struct glibc_layout *glibc_layout_find(const char *version) {
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        if (strcmp(layouts[i].version, version) == 0) {
            return &layouts[i];
        }
    }
    return NULL;
}
