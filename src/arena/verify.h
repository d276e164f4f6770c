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
bool verify_is_on(const struct arena *arena);

/* Returns whether the slow call that leaves the heap now is to verify it. The
 * caller holds the heap's lock. */
bool verify_is_due(const struct arena *arena);

/* Walks the heap, unless another thread is purging. The caller holds no lock of
 * the arena. */
void verify_arena(struct arena *arena);

/* Walks the heap. The caller holds the purger's lock, and no batch is out of
 * the heap. */
void verify_purged(struct arena *arena);

#else

static inline bool verify_is_on(const struct arena *arena) {
    (void)arena;
    return false;
}

static inline bool verify_is_due(const struct arena *arena) {
    (void)arena;
    return false;
}

static inline void verify_arena(struct arena *arena) {
    (void)arena;
}

static inline void verify_purged(struct arena *arena) {
    (void)arena;
}

#endif

#endif
