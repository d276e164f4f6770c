#include "base/assert.h"

/* The tests walk heaps in builds without assertions, too. */
#if defined(CALM_ASSERTIONS) || defined(CALM_WALK)

#include "os/text.h"

#include <stdlib.h>
#include <unistd.h>

/* Prints a value above 32 bits as an address. */
void assert_fail(const char *file, int line, const char *condition, const char *names, const uint64_t *values,
                 size_t count) {
    struct text text = {0};
    text_format(&text, "calmalloc: %s:%u: assertion failed: %s", file, (unsigned)line, condition);
    for (size_t i = 0; i < count; i++) {
        text_format(&text, i == 0 ? "; %s = " : ", ", names);
        if (values[i] >> 32 != 0) {
            text_format(&text, "%p", (const void *)(uintptr_t)values[i]);
        } else {
            text_format(&text, "%lu", values[i]);
        }
    }
    text_format(&text, "\n");
    text_write(&text, STDERR_FILENO);
    abort();
}

#endif
