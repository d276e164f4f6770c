/*
 * A mutex of one word. Without contention, acquiring and releasing it take one
 * atomic operation each. With contention, a thread spins and then sleeps on a
 * futex. All zero is unlocked. The mutex is not recursive, except around fork.
 * The functions preserve errno and allocate nothing. Every lock of the
 * allocator is a mutex of this kind.
 *
 * The word is the owner's thread pointer, so that a thread that forks can tell
 * its own locks from those of other threads. The forking thread may hold a lock
 * when it begins to fork, if a signal handler that interrupted the allocator
 * calls fork. It may acquire a lock again before the fork is over, if a fork
 * handler that runs inside the allocator's handler allocates.
 */
#ifndef CALM_OS_LOCK_H
#define CALM_OS_LOCK_H

#include "base/assert.h"
#include "os/rseq.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* The order in which a thread acquires locks. It may wait for a lock only while
 * all locks that it holds have earlier ranks. With assertions, a thread that
 * would wait for a lock out of this order aborts. Around fork, one function
 * acquires the locks of all heaps, in an order of its own. */
enum lock_rank {
    LOCK_UNRANKED, /* for tests */
    LOCK_START,
    LOCK_PROFILE_SWITCH,
    LOCK_PROFILE_SAMPLES,
    LOCK_OUTER_1, /* of libraries that are made of these layers and others */
    LOCK_OUTER_2,
    LOCK_ARENA_START,
    LOCK_PURGER,
    LOCK_CACHE_OPENING,
    LOCK_CPU_CACHE,
    LOCK_DEPOT_BIN,
    LOCK_HEAP,
    LOCK_RANKS
};

struct lock {
    _Atomic(uint64_t) state;               /* LOCK_FREE, or the owner's thread pointer with the flags below */
    _Atomic(struct lock *) next_contended; /* the next lock in the list of locks that a thread has slept on */
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

/* The calling thread calls these before it waits for a lock, after it has
 * acquired one, and before it releases one. */
void lock_check_rank(const struct lock *lock);
void lock_note_acquired(const struct lock *lock);
void lock_note_released(const struct lock *lock);

/* Called in a forked child. Forgets what the other threads held, since they do
 * not exist in the child. */
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
#define LOCK_FORK   2                   /* held over a fork; the owner may acquire it once more */
#define LOCK_INNER  4                   /* the owner has acquired it once more */
#define LOCK_KEPT   ((uint64_t)1 << 56) /* one for each fork that began while the owner held it */
#define LOCK_OWNER  (((uint64_t)1 << 56) - 8)

void lock_acquire_contended(struct lock *lock);
void lock_release_inner(struct lock *lock);
void lock_wake(struct lock *lock);

/* Returns the calling thread's pointer, which is aligned to at least 8 bytes
 * and has at most 52 bits. */
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

/* Acquires a lock for fork, whose order lock_check_rank does not know. */
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

/* Returns whether any thread holds the lock. */
static inline bool lock_is_held(const struct lock *lock) {
    return atomic_load_explicit(&lock->state, memory_order_relaxed) != LOCK_FREE;
}

/* Returns whether the calling thread holds the lock. */
static inline bool lock_is_mine(const struct lock *lock) {
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    return (state & LOCK_OWNER) == lock_self();
}

/*
 * Wakes one sleeper of each lock. That sleeper passes the wake-up on when it
 * releases the lock. This is the first step of a fork.
 *
 * A signal handler that forks may have interrupted its thread at two points:
 * between the release of a lock and the wake-up of the next owner, or after the
 * thread was woken and before it acquired the lock. In both cases the lock is
 * free, other threads sleep on it, and one of them may hold a lock that the
 * fork waits for.
 */
void lock_wake_sleepers(void);

/*
 * The forking thread calls these around fork. lock_acquire_for_fork acquires
 * the lock, unless the thread already holds it, in a section that a signal
 * interrupted. lock_release_after_fork restores the lock's state, in the parent
 * and in the child. In between, the thread may acquire the lock again, unless
 * it held the lock before.
 *
 * `waits` is false if another thread may hold the lock and wait for a lock that
 * this thread holds. The lock may then stay with that thread.
 */
void lock_acquire_for_fork(struct lock *lock, bool waits);
void lock_release_after_fork(struct lock *lock);

/* lock_acquire_for_fork for one of several locks of the last rank, which are
 * acquired in one order. The forking thread holds another one of them in an
 * interrupted section. The function waits, except for a thread that holds the
 * lock over a fork. That thread will wait for the lock of the interrupted
 * section before it forks, and what its own lock protects is consistent. */
void lock_acquire_unless_forking(struct lock *lock);

/* lock_release_after_fork in two steps, for locks that the forking thread has
 * acquired for the fork, or holds. lock_end_fork comes first, for all of them,
 * and takes away the sign by which lock_acquire_unless_forking knows them. */
void lock_end_fork(struct lock *lock);
void lock_release_ended(struct lock *lock);

/* Frees, in the child, a lock that stayed with another thread. Returns whether
 * it freed the lock; if so, the data that the lock protects may be
 * inconsistent. */
bool lock_reset_in_child(struct lock *lock);

#endif
