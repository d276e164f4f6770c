/* The next definition of a function of the C library, which a wrapper passes its calls on to. */
#ifndef CALM_API_NEXT_H
#define CALM_API_NEXT_H

#include "os/symbols.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* NULL if there is none. *known keeps it. Not in a signal handler at first. */
static inline any_function next_of(_Atomic(any_function) *known, const char *name) {
    any_function next = atomic_load_explicit(known, memory_order_relaxed);
    if (next == NULL) {
        next = (any_function)(uintptr_t)dlsym(RTLD_NEXT, name);
        atomic_store_explicit(known, next, memory_order_relaxed);
    }
    return next;
}

#endif
