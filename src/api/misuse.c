#include "api/misuse.h"

#include "api/debug.h"
#include "api/features.h"
#include "api/options.h"
#include "os/syscall.h"
#include "os/text.h"

#include <stdlib.h>
#include <unistd.h>

#define MAX_FRAMES 32

static void print_frames(struct text *text) {
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
    text_format(&text, "; thread %u", (unsigned)os_syscall(SYS_gettid));
    text_format(&text, misuse->late ? "; found as blocks left a cache, after the call that freed it; with "
                                      "CALM_OPTIONS=test_cache=off it is found in that call\n"
                                    : "\n");
    print_frames(&text);
    text_write(&text, STDERR_FILENO);
    if (calm_options.misuse == OPTION_MISUSE_ABORT) {
        abort();
    }
}

void misuse_report_now(enum misuse kind, const void *pointer) {
    misuse_report(&(struct misuse_record){kind, false, pointer});
}
