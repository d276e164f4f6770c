/*
 * The process's allocator, which malloc(3) and its relatives use: the arenas, and
 * the caches in front of them.
 */
#ifndef CALM_API_INSTANCE_H
#define CALM_API_INSTANCE_H

#include "arena/state.h"
#include "base/size_class.h"
#include "cache/cpu_cache.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* What the fast path of malloc reads of the size classes. */
struct fast_classes {
    uint32_t max_size;
    uint8_t small[SMALL_SIZES];
};

/* The variables that the fast paths read, each by one instruction. calm_classes
 * is empty before the start, and while the fast path of malloc is switched off.
 * All sizes then look too large for it. */
extern struct fast_classes calm_classes __attribute__((visibility("hidden")));
extern struct cpu_caches calm_caches __attribute__((visibility("hidden")));
/* The same caches, as new and delete reach them (cpu_caches_share). If new
 * calls another malloc, calm_new_caches stays as before the start. */
extern struct cpu_caches calm_new_caches __attribute__((visibility("hidden")));
extern struct arenas calm_arenas __attribute__((visibility("hidden")));

/* All size classes, also while the fast path of malloc is switched off. Once
 * allocator_is_ready, only the table of small sizes changes, once, from coarse
 * to fine. */
extern struct size_classes calm_all_classes __attribute__((visibility("hidden")));

/* The size of the machine's memory. It is constant once allocator_is_ready. */
extern size_t calm_memory_bytes __attribute__((visibility("hidden")));

/* Whether malloc belongs to another object, so that new and delete call it.
 * Constant once allocator_is_ready. */
extern bool calm_new_is_passed_on __attribute__((visibility("hidden")));

/* The start sets it last. */
extern _Atomic(bool) calm_ready __attribute__((visibility("hidden")));

static inline bool allocator_is_ready(void) {
    return atomic_load_explicit(&calm_ready, memory_order_acquire);
}

/* Starts the allocator, unless another thread has started it (init.c). Returns
 * false if there is no memory at all, or if a sanitizer brings an allocator of
 * its own. */
bool allocator_start(void);

/* Starts the allocator at the first call, and returns the result of
 * allocator_start. Any thread may call it. Preserves errno. */
static inline bool allocator_ensure_started(void) {
    return allocator_is_ready() || allocator_start();
}

/* Switches the fast path of malloc on or off. While it is off, each call comes
 * to allocate_slow, which knows all classes. free is not affected. The caller
 * may switch at any time, because a concurrent malloc works with the old and
 * with the new value of each entry. */
void allocator_use_fast_path(bool use);

/* Gives each size its own class. Any thread may call it at any time. */
void allocator_refine_classes(void);

#endif
