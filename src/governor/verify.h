/*
 * The heap's consistency, checked in a running program: with assertions, and with the option test_check=N,
 * the heap is walked (heap/walk.h) once in N slow calls, after each purge, before a fork and at exit. Without
 * assertions these functions do nothing.
 */
#ifndef CALM_GOVERNOR_VERIFY_H
#define CALM_GOVERNOR_VERIFY_H

#include "governor/state.h"

#ifdef CALM_ASSERTIONS

/* Whether the option is set. Any thread. */
bool governor_verifies(const struct governor *governor);

/* Whether a slow call that leaves the heap is to verify it. Under the heap's lock. */
bool governor_should_verify(const struct governor *governor);

/* Walks the heap, unless another thread is purging. The caller holds no lock of the governor's. */
void governor_verify(struct governor *governor);

/* The same under the purger's lock, while no batch is out. */
void governor_verify_purged(struct governor *governor);

#else

static inline bool governor_verifies(const struct governor *governor) {
    (void)governor;
    return false;
}

static inline bool governor_should_verify(const struct governor *governor) {
    (void)governor;
    return false;
}

static inline void governor_verify(struct governor *governor) {
    (void)governor;
}

static inline void governor_verify_purged(struct governor *governor) {
    (void)governor;
}

#endif

#endif
