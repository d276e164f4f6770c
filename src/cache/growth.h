/*
 * The rule by which a bounded stack of free blocks grows. If threads fill and
 * empty a stack over and over, they soon fetch the blocks that it refused from
 * a slower place. Therefore a stack grows once it was full GROWTH_TURNS times,
 * and empty as often, since the last check. The stacks of the CPU caches and
 * the bins of the depot follow this rule.
 *
 * Any thread may call these functions. If two threads count at the same time, a
 * count may be lost. A count that keeps its value is not written, so that its
 * cache line stays shared.
 */
#ifndef CALM_CACHE_GROWTH_H
#define CALM_CACHE_GROWTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GROWTH_TURNS 4

/* A flush passes blocks to a function of this type. */
typedef void put_flushed(void *context, void *const *blocks, size_t count);

struct turns {
    _Atomic(uint8_t) full;
    _Atomic(uint8_t) empty;
};

static inline uint8_t turns_get(const _Atomic(uint8_t) *count) {
    return atomic_load_explicit(count, memory_order_relaxed);
}

static inline void turns_set(_Atomic(uint8_t) *count, uint8_t value) {
    if (turns_get(count) != value) {
        atomic_store_explicit(count, value, memory_order_relaxed);
    }
}

/* Counts one more time that the stack was full, or empty. */
static inline void turns_note(_Atomic(uint8_t) *count) {
    uint8_t value = turns_get(count);
    turns_set(count, value < UINT8_MAX ? value + 1 : value);
}

/* Counts only changes between full and empty. This is for a bin, which many
 * threads in a row may find full, or empty. */
static inline void turns_note_alternation(struct turns *turns, bool full) {
    if ((turns_get(&turns->full) > turns_get(&turns->empty)) != full) {
        turns_note(full ? &turns->full : &turns->empty);
    }
}

static inline bool turns_are_due(const struct turns *turns) {
    return turns_get(&turns->full) >= GROWTH_TURNS && turns_get(&turns->empty) >= GROWTH_TURNS;
}

/* Restarts both counts. If the stack was full more often than empty, it counts
 * as full once, and otherwise as never full. */
static inline void turns_restart(struct turns *turns) {
    turns_set(&turns->full, turns_get(&turns->full) > turns_get(&turns->empty));
    turns_set(&turns->empty, 0);
}

#endif
