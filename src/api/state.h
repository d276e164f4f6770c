/*
 * The process's allocator: the one instance that malloc(3) and its relatives work on. Other instances may
 * exist beside it, each a struct allocator of its own.
 */
#ifndef CALM_API_STATE_H
#define CALM_API_STATE_H

#include "backend/backend.h"
#include "cache/cpu_cache.h"
#include "governor/state.h"
#include "heap/size_class.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct allocator {
    struct size_classes classes;
    struct governor *governor;
    struct cpu_caches *caches;
    struct backend *backend;
    size_t memory_bytes; /* of the machine */
};

/* What the fast paths name, each reached by one instruction. calm_classes is empty before the start and while
 * the fast path of malloc is switched off: then all sizes look too large for it. */
extern struct size_classes calm_classes __attribute__((visibility("hidden")));
extern struct cpu_caches calm_caches __attribute__((visibility("hidden")));
/* The same caches for new and delete. It stays as before the start where new is passed on. */
extern struct cpu_caches calm_new_caches __attribute__((visibility("hidden")));
extern struct governor calm_governor __attribute__((visibility("hidden")));

/* All of the instance. Constant once allocator_is_ready. */
extern struct allocator calm_allocator __attribute__((visibility("hidden")));

/* Whether malloc is another object's, so that new and delete call that. Constant once allocator_is_ready. */
extern bool calm_new_is_passed_on __attribute__((visibility("hidden")));

/* Set by the start, once everything above is filled. */
extern _Atomic(bool) calm_ready __attribute__((visibility("hidden")));

static inline bool allocator_is_ready(void) {
    return atomic_load_explicit(&calm_ready, memory_order_acquire);
}

/* init.c: starts the allocator at the first call; any number of calls, from any thread. False if there is no
 * memory at all, or a sanitizer brings an allocator of its own. Preserves errno. */
bool allocator_ready(void);

/*
 * Whether malloc's fast path finds the size classes: with false each call comes to allocate_slow, where all
 * classes are known. At any time, as a thread that reads the old or the new of any entry does the right
 * thing; free is not concerned.
 */
void allocator_use_fast_path(bool use);

#endif
