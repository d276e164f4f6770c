/*
 * The operations on CPU caches in the mode CACHE_LOCKED, which is for processes
 * without restartable sequences.
 *
 * Each cache has a lock, which a thread holds for a few instructions. A thread
 * uses the cache that its thread pointer hashes to. While the process has one
 * thread, that thread uses the first cache. It needs no lock, because no second
 * thread can start before an operation on the cache returns.
 *
 * cpu_cache.c, and the fast paths of malloc and free, call these functions.
 */
#ifndef CALM_CACHE_LOCKED_H
#define CALM_CACHE_LOCKED_H

#include "cache/stacks.h"

/* Returns whether the caller is the only thread, and may omit the lock. By the
 * acquire, the caller sees what a helper that has ended left in the cache. */
static inline bool cpu_cache_is_single_threaded(const struct cpu_caches *caches) {
    return __builtin_expect(*atomic_load_explicit(&caches->single, memory_order_acquire) != 0, 1);
}

/* Returns the number of the caller's cache. */
static inline unsigned locked_number(const struct cpu_caches *caches) {
    return cpu_cache_is_single_threaded(caches) ? 0 : thread_slot(caches->count);
}

/* Move up to `count` blocks from, or to, the caller's cache. Return the number
 * of blocks moved. */
size_t locked_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, size_t count);
size_t locked_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                        size_t count);

/* Returns whether a block that its owner frees is the newest in the caller's
 * cache. */
bool locked_has_newest(const struct cpu_caches *caches, uint32_t size_class, const void *block);

/* ---- one block ---- */

/* Pop and push a block. The caller is the only thread, or holds the lock.
 * stack_push also returns false if the block is the newest in the cache, and so
 * was freed before. */
static inline __attribute__((always_inline)) bool stack_pop(struct stack *stack, void **popped) {
    void **top = atomic_load_explicit(&stack->top, memory_order_relaxed);
    uintptr_t not_bottom = atomic_load_explicit(&stack->not_bottom, memory_order_relaxed);
    uintptr_t above;
    if (__builtin_expect(!__builtin_add_overflow((uintptr_t)top, not_bottom, &above), 0)) {
        return false;
    }
    *popped = top[-1];
    atomic_store_explicit(&stack->top, top - 1, memory_order_relaxed);
    return true;
}

static inline __attribute__((always_inline)) bool stack_push(struct stack *stack, void *block) {
    void **top = atomic_load_explicit(&stack->top, memory_order_relaxed);
    if (__builtin_expect(top >= atomic_load_explicit(&stack->end, memory_order_relaxed) || top[-1] == block,
                         0)) {
        return false;
    }
    *top = block;
    atomic_store_explicit(&stack->top, top + 1, memory_order_relaxed);
    return true;
}

/* The same under the lock of the caller's cache. Return false also in other
 * modes, and for the only thread. The slow paths of malloc and free call these
 * functions first. */
bool locked_pop(const struct cpu_caches *caches, uint32_t size_class, void **popped);
bool locked_push(const struct cpu_caches *caches, uint32_t size_class, void *block);

/* The same for the only thread. These functions access the words of the first
 * cache like plain memory. The empty assembly keeps the compiler from
 * addressing the words by an index. */
static inline __attribute__((always_inline)) struct stack *alone_stack(const struct cpu_caches *caches,
                                                                       uint32_t size_class) {
    struct stack *stack = stack_of(caches->base, size_class);
    __asm__("" : "+r"(stack));
    return stack;
}

static inline __attribute__((always_inline)) bool unlocked_pop(const struct cpu_caches *caches,
                                                               uint32_t size_class, void **popped) {
    return stack_pop(alone_stack(caches, size_class), popped);
}

static inline __attribute__((always_inline)) bool unlocked_push(const struct cpu_caches *caches,
                                                                uint32_t size_class, void *block) {
    return stack_push(alone_stack(caches, size_class), block);
}

#endif
