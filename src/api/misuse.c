#include "api/misuse.h"

#include "api/options.h"
#include "os/text.h"

#include <stdlib.h>

void misuse_report(enum misuse kind, const void *pointer) {
    text_write_line(2,
                    kind == MISUSE_DOUBLE_FREE
                        ? "calmalloc: double free: %p was freed before"
                        : "calmalloc: invalid free: %p is not the start of an allocated block",
                    pointer);
    if (calm_options.misuse == OPTION_MISUSE_ABORT) {
        abort();
    }
}
