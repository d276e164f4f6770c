/*
 * When a bounded stack of free blocks grows. Where threads fill and empty it over and over, what it refuses
 * is soon fetched again from farther away: so it grows once it was full GROWTH_TURNS times and empty as often
 * since the last check. The stacks of the CPU caches and the bins of the depot follow this rule.
 *
 * Any thread; threads that count at the same time may lose a count. What does not change is not written.
 */
#ifndef CALM_CACHE_GROWTH_H
#define CALM_CACHE_GROWTH_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GROWTH_TURNS 4

/* Takes the blocks of a flush. */
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

/* The stack was full, or empty. */
static inline void turns_note(_Atomic(uint8_t) *count) {
    uint8_t value = turns_get(count);
    turns_set(count, value < UINT8_MAX ? value + 1 : value);
}

/* The same where it alternates: of a bin, which many threads in a row may find full, or empty. */
static inline void turns_note_alternation(struct turns *turns, bool full) {
    if ((turns_get(&turns->full) > turns_get(&turns->empty)) != full) {
        turns_note(full ? &turns->full : &turns->empty);
    }
}

static inline bool turns_are_due(const struct turns *turns) {
    return turns_get(&turns->full) >= GROWTH_TURNS && turns_get(&turns->empty) >= GROWTH_TURNS;
}

/* Counts anew. A stack that was full last still is. */
static inline void turns_restart(struct turns *turns) {
    turns_set(&turns->full, turns_get(&turns->full) > turns_get(&turns->empty));
    turns_set(&turns->empty, 0);
}

#endif
