#include "os/lock.h"

#include "os/syscall.h"

#include <linux/futex.h>

/*
 * For so many pauses a thread spins before it sleeps, 20 to 60 us on x86-64 since Skylake and Zen: several
 * times a heap's section, so that where every CPU has a thread at it, none pays for a sleep and a wake.
 * Between two looks at the lock lie up to SPINS_AT_ONCE, for each look takes the line from whoever holds it.
 */
#define SPINS         1024
#define SPINS_AT_ONCE 32

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("isb"); /* tens of ns; yield is nothing where a core has one thread */
#endif
}

/* The kernel compares 32 bits: those with the flags. */
static long futex_word(struct lock *lock) {
    size_t upper = __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? sizeof(uint32_t) : 0;
    return (long)((uintptr_t)&lock->state + upper);
}

/* The locks that were contended, by next_contended; the last one's is the end. */
static struct lock end_of_contended;
static _Atomic(struct lock *) contended = &end_of_contended;

/*
 * Before a thread sleeps. Another thread may find a lock linked that is not on the list yet, and sleep: the
 * one that links it has been neither woken nor has it released the lock, so that no wake-up is lost if a
 * signal handler forks here.
 */
static void link_contended(struct lock *lock) {
    struct lock *none = NULL;
    if (atomic_load_explicit(&lock->next_contended, memory_order_relaxed) != NULL ||
        !atomic_compare_exchange_strong_explicit(&lock->next_contended, &none, &end_of_contended,
                                                 memory_order_relaxed, memory_order_relaxed)) {
        return;
    }
    struct lock *first = atomic_load_explicit(&contended, memory_order_relaxed);
    do {
        atomic_store_explicit(&lock->next_contended, first, memory_order_relaxed);
    } while (!atomic_compare_exchange_weak_explicit(&contended, &first, lock, memory_order_release,
                                                    memory_order_relaxed));
}

void lock_wake_sleepers(void) {
    struct lock *lock = atomic_load_explicit(&contended, memory_order_acquire);
    while (lock != &end_of_contended) {
        lock_wake(lock);
        lock = atomic_load_explicit(&lock->next_contended, memory_order_relaxed);
    }
}

/* The forking thread comes again: there is no other thread that it could wait for. */
static bool enter_again(struct lock *lock) {
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    if ((state & (LOCK_FORK | LOCK_INNER)) != LOCK_FORK || !lock_is_mine(lock)) {
        return false;
    }
    atomic_fetch_or_explicit(&lock->state, LOCK_INNER, memory_order_relaxed);
    return true;
}

void lock_release_inner(struct lock *lock) {
    atomic_fetch_and_explicit(&lock->state, ~(uint64_t)LOCK_INNER, memory_order_relaxed);
}

void lock_acquire_contended(struct lock *lock) {
    if (enter_again(lock)) {
        return;
    }
    int at_once = 1;
    for (int spins = 0; spins < SPINS; spins += at_once) {
        if (atomic_load_explicit(&lock->state, memory_order_relaxed) == LOCK_FREE && lock_try(lock)) {
            return;
        }
        at_once = at_once < SPINS_AT_ONCE ? at_once * 2 : at_once;
        for (int i = 0; i < at_once; i++) {
            relax();
        }
    }
    link_contended(lock);
    /* From here on the lock is taken as one that is waited for, since others may sleep too: a needless wake,
     * never a lost one. */
    uint64_t mine = lock_self() | LOCK_WAITED;
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    for (;;) {
        if (state == LOCK_FREE) {
            if (atomic_compare_exchange_weak_explicit(&lock->state, &state, mine, memory_order_acquire,
                                                      memory_order_relaxed)) {
                return;
            }
        } else if ((state & LOCK_WAITED) != 0 ||
                   atomic_compare_exchange_weak_explicit(&lock->state, &state, state | LOCK_WAITED,
                                                         memory_order_relaxed, memory_order_relaxed)) {
            os_syscall(SYS_futex, futex_word(lock), FUTEX_WAIT_PRIVATE, (long)(uint32_t)(state | LOCK_WAITED),
                       0, 0, 0);
            state = atomic_load_explicit(&lock->state, memory_order_relaxed);
        }
    }
}

void lock_wake(struct lock *lock) {
    os_syscall(SYS_futex, futex_word(lock), FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}

void lock_acquire_for_fork(struct lock *lock, bool waits) {
    if (lock_is_mine(lock)) {
        atomic_fetch_add_explicit(&lock->state, LOCK_KEPT, memory_order_relaxed);
        return;
    }
    if (waits) {
        lock_acquire(lock);
    } else if (!lock_try(lock)) {
        return;
    }
    atomic_fetch_or_explicit(&lock->state, LOCK_FORK, memory_order_relaxed);
}

void lock_release_after_fork(struct lock *lock) {
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    if (!lock_is_mine(lock)) {
        return;
    }
    if (state >= LOCK_KEPT) {
        atomic_fetch_sub_explicit(&lock->state, LOCK_KEPT, memory_order_relaxed);
    } else if ((state & LOCK_FORK) != 0) {
        lock_release(lock);
    }
}

bool lock_reset_in_child(struct lock *lock) {
    if (atomic_load_explicit(&lock->state, memory_order_relaxed) == LOCK_FREE || lock_is_mine(lock)) {
        return false;
    }
    atomic_store_explicit(&lock->state, LOCK_FREE, memory_order_relaxed);
    return true;
}
