/*
 * A mutex of one word: uncontended, one atomic exchange each way; contended, a short spin and then a futex.
 * All zero is unlocked. Not recursive. Preserves errno; allocates nothing.
 */
#ifndef CALM_OS_LOCK_H
#define CALM_OS_LOCK_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct lock {
    _Atomic(uint32_t) state; /* LOCK_FREE, LOCK_HELD, or LOCK_WAITED: held, and somebody may sleep on it */
};

enum { LOCK_FREE, LOCK_HELD, LOCK_WAITED };

void lock_acquire_contended(struct lock *lock);
void lock_wake(struct lock *lock);

static inline bool lock_try(struct lock *lock) {
    uint32_t expected = LOCK_FREE;
    return atomic_compare_exchange_strong_explicit(&lock->state, &expected, LOCK_HELD, memory_order_acquire,
                                                   memory_order_relaxed);
}

static inline void lock_acquire(struct lock *lock) {
    if (!lock_try(lock)) {
        lock_acquire_contended(lock);
    }
}

static inline void lock_release(struct lock *lock) {
    if (atomic_exchange_explicit(&lock->state, LOCK_FREE, memory_order_release) == LOCK_WAITED) {
        lock_wake(lock);
    }
}

#endif
