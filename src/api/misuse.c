#include "api/misuse.h"

#include "api/options.h"
#include "os/text.h"

#include <stdlib.h>

void misuse_report(enum misuse kind, const void *pointer) {
    struct text line = {0};
    text_string(&line, kind == MISUSE_DOUBLE_FREE ? "calmalloc: double free: " : "calmalloc: invalid free: ");
    text_pointer(&line, pointer);
    text_string(&line, kind == MISUSE_DOUBLE_FREE ? " was freed before\n"
                                                  : " is not the start of an allocated block\n");
    text_write(&line, 2);
    if (calm_options.misuse == OPTION_MISUSE_ABORT) {
        abort();
    }
}
