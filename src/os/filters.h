/*
 * Seccomp filters. A filter may kill the process for a system call that the
 * filter does not know. Once the program has added one, the library makes only
 * system calls that the C library's malloc makes, too.
 *
 * A filter may exist before the program starts, as in a container. The wrappers
 * of prctl and syscall in src/api notice a filter that the program adds. Any
 * thread may call these functions, which preserve errno and allocate nothing.
 */
#ifndef CALM_OS_FILTERS_H
#define CALM_OS_FILTERS_H

#include <stdatomic.h>
#include <stdbool.h>

enum filters {
    FILTERS_NONE,
    FILTERS_INHERITED, /* or not known yet; these filters allow what a program needs to start: threads,
                          reading files */
    FILTERS_ADDED,
};

extern _Atomic(int) filters_state __attribute__((visibility("hidden")));
extern _Atomic(unsigned) filters_set_calls __attribute__((visibility("hidden")));

/* Asks the kernel for filters, at the start of the process. */
void filters_detect(void);

void filters_set(enum filters filters);

static inline enum filters filters_now(void) {
    return (enum filters)atomic_load_explicit(&filters_state, memory_order_relaxed);
}

/* Returns a number that changes when filters may have been added. */
static inline unsigned filters_changes(void) {
    return atomic_load_explicit(&filters_set_calls, memory_order_relaxed);
}

/* Returns whether any system call may be tried. */
static inline bool filters_allow_all(void) {
    return filters_now() == FILTERS_NONE;
}

#endif
