/*
 * Seccomp filters, which may kill a process for a system call that they do not know. Once the program has
 * added one, the library makes only system calls that the C library's malloc makes, too.
 *
 * A filter exists before the program starts, as in a container, or is added by the program, which src/api's
 * wrappers of prctl and syscall notice. Any thread; preserves errno; allocates nothing.
 */
#ifndef CALM_OS_FILTERS_H
#define CALM_OS_FILTERS_H

#include <stdatomic.h>
#include <stdbool.h>

enum filters {
    FILTERS_NONE,
    FILTERS_INHERITED, /* or not known yet; allow what a program needs to start: threads, reading files */
    FILTERS_ADDED,
};

extern _Atomic(int) filters_state __attribute__((visibility("hidden")));
extern _Atomic(unsigned) filters_set_calls __attribute__((visibility("hidden")));

/* Asks the kernel, at the start of the process. */
void filters_detect(void);

void filters_set(enum filters filters);

static inline enum filters filters_now(void) {
    return (enum filters)atomic_load_explicit(&filters_state, memory_order_relaxed);
}

/* Another number once filters may have been added. */
static inline unsigned filters_changes(void) {
    return atomic_load_explicit(&filters_set_calls, memory_order_relaxed);
}

/* Whether any system call may be tried. */
static inline bool filters_allow_all(void) {
    return filters_now() == FILTERS_NONE;
}

#endif
