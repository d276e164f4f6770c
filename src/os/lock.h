/*
 * A mutex of one word: uncontended, one atomic operation each way; contended, a spin and then a futex.
 * All zero is unlocked. Not recursive, except around fork. Preserves errno; allocates nothing. Every lock of
 * the allocator is one of these.
 *
 * The word is the owner's thread pointer, so that a thread that forks can tell its own locks from other
 * threads'. It may hold one when it begins to fork, if a signal handler that interrupted the allocator calls
 * fork. And it may acquire one again before the fork is over, if a fork handler that runs inside ours
 * allocates.
 */
#ifndef CALM_OS_LOCK_H
#define CALM_OS_LOCK_H

#include "base/assert.h"
#include "os/rseq.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/*
 * The order in which a thread acquires locks: one only while those that it holds are of earlier ranks. With
 * assertions, a thread that would wait for a lock out of this order aborts. Around fork, where one function
 * acquires the locks of all heaps, the order is that function's.
 */
enum lock_rank {
    LOCK_UNRANKED, /* of tests */
    LOCK_START,
    LOCK_PROFILE_SWITCH,
    LOCK_PROFILE_SAMPLES,
    LOCK_SERVER_FORK,
    LOCK_SERVER_OPEN,
    LOCK_SECOND_HEAP,
    LOCK_PURGER,
    LOCK_CPU_CACHE,
    LOCK_DEPOT_BIN,
    LOCK_HEAP,
    LOCK_OVERFLOW,
    LOCK_MAILBOX,
    LOCK_RANKS
};

struct lock {
    _Atomic(uint64_t) state;               /* LOCK_FREE, or the owner's thread pointer with the bits below */
    _Atomic(struct lock *) next_contended; /* in the list of locks that a thread has slept on */
#ifdef CALM_ASSERTIONS
    enum lock_rank rank;
#endif
};

#ifdef CALM_ASSERTIONS
#define LOCK_OF(of) \
    { .rank = (of) }

static inline void lock_set_rank(struct lock *lock, enum lock_rank rank) {
    lock->rank = rank;
}

/* Before the calling thread waits for a lock, after it acquired one, and before it releases one. */
void lock_check_rank(const struct lock *lock);
void lock_note_acquired(const struct lock *lock);
void lock_note_released(const struct lock *lock);

/* In a forked child: no other thread holds a lock. */
void lock_ranks_after_fork(void);
#else
#define LOCK_OF(of) \
    { 0 }

static inline void lock_set_rank(struct lock *lock, enum lock_rank rank) {
    (void)lock, (void)rank;
}

static inline void lock_check_rank(const struct lock *lock) {
    (void)lock;
}

static inline void lock_note_acquired(const struct lock *lock) {
    (void)lock;
}

static inline void lock_note_released(const struct lock *lock) {
    (void)lock;
}

static inline void lock_ranks_after_fork(void) {
}
#endif

#define LOCK_FREE   0
#define LOCK_WAITED 1                   /* another thread may sleep on it */
#define LOCK_FORK   2                   /* held over a fork: the owner may acquire it once more */
#define LOCK_INNER  4                   /* the owner has done so */
#define LOCK_KEPT   ((uint64_t)1 << 56) /* counts forks that began while the owner held it already */
#define LOCK_OWNER  (((uint64_t)1 << 56) - 8)

void lock_acquire_contended(struct lock *lock);
void lock_release_inner(struct lock *lock);
void lock_wake(struct lock *lock);

/* A thread pointer is aligned to 8 bytes at least, and of 52 bits at most. */
static inline uint64_t lock_self(void) {
    return (uint64_t)(uintptr_t)thread_pointer();
}

static inline bool lock_try(struct lock *lock) {
    uint64_t expected = LOCK_FREE;
    if (!atomic_compare_exchange_strong_explicit(&lock->state, &expected, lock_self(), memory_order_acquire,
                                                 memory_order_relaxed)) {
        return false;
    }
    lock_note_acquired(lock);
    return true;
}

/* For fork, whose order lock_check_rank does not know. */
static inline void lock_acquire_in_any_order(struct lock *lock) {
    if (!lock_try(lock)) {
        lock_acquire_contended(lock);
    }
}

static inline void lock_acquire(struct lock *lock) {
    lock_check_rank(lock);
    lock_acquire_in_any_order(lock);
}

static inline void lock_release(struct lock *lock) {
    calm_assert(atomic_load_explicit(&lock->state, memory_order_relaxed) != LOCK_FREE, lock);
    if (__builtin_expect((atomic_load_explicit(&lock->state, memory_order_relaxed) & LOCK_INNER) != 0, 0)) {
        lock_release_inner(lock);
        return;
    }
    lock_note_released(lock);
    if ((atomic_exchange_explicit(&lock->state, LOCK_FREE, memory_order_release) & LOCK_WAITED) != 0) {
        lock_wake(lock);
    }
}

/* Whether any thread holds it. */
static inline bool lock_is_held(const struct lock *lock) {
    return atomic_load_explicit(&lock->state, memory_order_relaxed) != LOCK_FREE;
}

/* Whether the calling thread holds it. */
static inline bool lock_is_mine(const struct lock *lock) {
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    return (state & LOCK_OWNER) == lock_self();
}

/*
 * First step of a fork. A signal handler that forks may have interrupted its thread between a release and the
 * wake-up of the next owner, or after the thread was woken and before it acquired the lock. Then the lock is
 * free, other threads sleep on it, and one of them may hold a lock that the fork is going to wait for. This
 * wakes one sleeper of each lock, which passes the wake-up on with its own release.
 */
void lock_wake_sleepers(void);

/*
 * Around fork, in the forking thread. Before: acquires the lock, unless the thread holds it already, in a
 * section that a signal interrupted. waits is false if another thread may hold the lock and wait for one that
 * this thread holds; then the lock may be left to that thread. After, in the parent and in the child:
 * restores the lock's state. In between the thread may acquire it again, unless it held it already.
 */
void lock_acquire_for_fork(struct lock *lock, bool waits);
void lock_release_after_fork(struct lock *lock);

/* In the child: frees a lock that was left to another thread. True if it was: then the data that it protects
 * may be inconsistent. */
bool lock_reset_in_child(struct lock *lock);

#endif
