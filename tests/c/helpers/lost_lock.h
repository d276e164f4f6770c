/* A lock whose owner never releases it, such as a thread that a forked child does not have. The order of
 * locks, which debug builds check by thread, knows nothing of it. */
#ifndef CALM_TESTS_LOST_LOCK_H
#define CALM_TESTS_LOST_LOCK_H

#include "os/lock.h"

#include "check.h"

static inline void lock_lose(struct lock *lock) {
    CHECK(!lock_is_held(lock));
    atomic_store(&lock->state, lock_self());
}

static inline void lock_find(struct lock *lock) {
    atomic_store(&lock->state, LOCK_FREE);
}

#endif
