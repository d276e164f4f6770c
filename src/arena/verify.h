/*
 * Checks the heap's consistency in a running program. In builds with
 * assertions, and with the option test_check=N, it walks the heap
 * (heap/walk.h): once in N slow calls, after each purge, before a fork and at
 * exit. In other builds these functions do nothing.
 */
#ifndef CALM_ARENA_VERIFY_H
#define CALM_ARENA_VERIFY_H

#include "arena/state.h"

#ifdef CALM_ASSERTIONS

/* Returns whether the option is set. Any thread may call it. */
bool verify_is_on(const struct arenas *arenas);

/* Returns whether the slow call of this number, which leaves a heap now, is to
 * verify the heaps. */
bool verify_is_due(const struct arenas *arenas, uint64_t checks);

/* Walks the heaps, unless another thread is purging. The caller holds no lock of
 * the arena. */
void verify_arena(struct arenas *arenas);

/* Walks the heaps. The caller holds the purger's lock, and no batch is out of
 * the heaps. */
void verify_purged(struct arenas *arenas);

#else

static inline bool verify_is_on(const struct arenas *arenas) {
    (void)arenas;
    return false;
}

static inline bool verify_is_due(const struct arenas *arenas, uint64_t checks) {
    (void)arenas, (void)checks;
    return false;
}

static inline void verify_arena(struct arenas *arenas) {
    (void)arenas;
}

static inline void verify_purged(struct arenas *arenas) {
    (void)arenas;
}

#endif

#endif
