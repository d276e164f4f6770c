/*
 * The next definition of a function of the C library, to which a wrapper passes
 * its calls on. Such wrappers are in the shared library only, because a wrapper
 * in a static program cannot find the C library's own definition.
 */
#ifndef CALM_API_NEXT_H
#define CALM_API_NEXT_H

#include "api/link_order.h"
#include "os/symbols.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

/* Returns the next definition, or NULL if there is none. *known caches it. Under
 * glibc it does not use dlsym, which older versions have in a library that the
 * program may lack. Elsewhere the first call must not be in a signal handler,
 * where dlsym is not safe: a constructor looks up the functions that signal
 * handlers may call. */
static inline any_function next_of(_Atomic(any_function) *known, const char *name) {
    any_function next = atomic_load_explicit(known, memory_order_relaxed);
    if (next == NULL) {
#ifdef __GLIBC__
        next = link_order_next(name);
#else
        next = (any_function)(uintptr_t)dlsym(RTLD_NEXT, name);
#endif
        atomic_store_explicit(known, next, memory_order_relaxed);
    }
    return next;
}

#endif
