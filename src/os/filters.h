/*
 * Seccomp filters, which may end a process for a system call that they do not know. Under one, no system call
 * is made after the start that the C library's malloc would not make.
 *
 * A filter is there before the program starts, as in a container; or the program adds it, which src/api's
 * wrappers of prctl and syscall see. Any thread; preserves errno; allocates nothing.
 */
#ifndef CALM_OS_FILTERS_H
#define CALM_OS_FILTERS_H

#include <stdatomic.h>
#include <stdbool.h>

enum filters {
    FILTERS_UNKNOWN, /* not looked yet: as inherited ones */
    FILTERS_NONE,
    FILTERS_INHERITED, /* these let a program start: threads, and files that are read */
    FILTERS_ADDED,
};

extern _Atomic(int) filters_state __attribute__((visibility("hidden")));

/* Asks the kernel, at the start of the process. */
void filters_look(void);

void filters_note(enum filters filters);

static inline enum filters filters_now(void) {
    return (enum filters)atomic_load_explicit(&filters_state, memory_order_relaxed);
}

/* Whether any system call may be tried. */
static inline bool filters_allow_all(void) {
    return filters_now() == FILTERS_NONE;
}

#endif
