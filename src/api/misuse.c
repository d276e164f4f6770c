#include "api/misuse.h"

#include "api/debug.h"
#include "api/features.h"
#include "api/options.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/text.h"

#include <stdlib.h>
#include <unistd.h>

#define MAX_FRAMES 32

/* Called by the thread that frees the pointer. */
static void print_caller(struct text *text) {
    text_format(text, "; thread %u\n", (unsigned)os_syscall(SYS_gettid));
    uintptr_t addresses[MAX_FRAMES];
    size_t depth = unwind_here(addresses, MAX_FRAMES);
    for (size_t i = 0; i < depth; i++) {
        text_format(text, "    #%zu ", i);
        unwind_print_address(addresses[i], text);
        text_format(text, "\n");
    }
}

void misuse_report(const struct misuse_record *misuse) {
    struct text text = {0};
    text_format(&text,
                "calmalloc: %s: ", misuse->kind == MISUSE_DOUBLE_FREE ? "double free" : "invalid free");
    debug_describe(misuse->pointer, &text);
    if (misuse->late) {
        text_format(&text, "; found after the call that freed it, as blocks left a cache; with "
                           "CALM_OPTIONS=misuse=immediate it is found in that call\n");
    } else if (filters_now() == FILTERS_ADDED) { /* the filter may forbid the system calls of print_caller */
        text_format(&text, "\n");
    } else {
        print_caller(&text);
    }
    text_write(&text, STDERR_FILENO);
    if (calm_options.misuse != OPTION_MISUSE_WARN) {
        abort();
    }
}

void misuse_report_now(enum misuse kind, const void *pointer) {
    misuse_report(&(struct misuse_record){kind, false, pointer});
}
