#include "os/lock.h"

#include "os/futex.h"
#include "os/syscall.h"

#include <linux/futex.h>
#include <string.h>

/*
 * The number of pauses in the longest wait of a thread that spins before it
 * sleeps. All waits together take twice as long: 10 to 60 us on x86-64 since
 * Skylake and Zen 2. This is several times the length of a section that holds
 * the heap's lock, so that few threads pay for a sleep and a wake-up when every
 * CPU runs a thread that uses the heap.
 *
 * Each read of the lock takes the lock's cache line from the owner's CPU. A
 * thread that then acquires the lock takes the heap's cache lines, too. Each
 * wait is therefore as long as all waits before it together. Between two reads
 * the owner keeps these lines, and at most half of a thread's wait passes after
 * the lock became free.
 */
#define MAX_PAUSES 512

/* The kernel compares the first 32 bits, which contain the flags. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the flags are in a lock's first bytes");

/* The list of contended locks, linked by next_contended. The last lock points
 * to the end marker. */
static struct lock end_of_contended;
static _Atomic(struct lock *) contended = &end_of_contended;

/* Adds a lock to the list before a thread sleeps on it. Another thread may see
 * next_contended set before the lock is on the list, and may sleep. No wake-up
 * is lost if a signal handler forks in this function, because the linking
 * thread has neither been woken nor has it released the lock. */
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

/* Returns whether the caller is the forking thread, which holds the lock and
 * need not wait for it. */
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
    for (int pauses = 2; pauses <= MAX_PAUSES; pauses *= 2) {
        for (int i = 0; i < pauses; i++) {
            cpu_relax();
        }
        if (atomic_load_explicit(&lock->state, memory_order_relaxed) == LOCK_FREE && lock_try(lock)) {
            return;
        }
    }
    link_contended(lock);
    /* Other threads may sleep, too. This thread therefore acquires the lock
     * with LOCK_WAITED set from here on. A wake-up may then be needless, but
     * none is lost. */
    uint64_t mine = lock_self() | LOCK_WAITED;
    uint64_t state = atomic_load_explicit(&lock->state, memory_order_relaxed);
    for (;;) {
        if (state == LOCK_FREE) {
            if (atomic_compare_exchange_weak_explicit(&lock->state, &state, mine, memory_order_acquire,
                                                      memory_order_relaxed)) {
                lock_note_acquired(lock);
                return;
            }
        } else if ((state & LOCK_WAITED) != 0 ||
                   atomic_compare_exchange_weak_explicit(&lock->state, &state, state | LOCK_WAITED,
                                                         memory_order_relaxed, memory_order_relaxed)) {
            os_syscall(SYS_futex, &lock->state, FUTEX_WAIT_PRIVATE, (uint32_t)(state | LOCK_WAITED));
            state = atomic_load_explicit(&lock->state, memory_order_relaxed);
        }
    }
}

void lock_wake(struct lock *lock) {
    os_syscall(SYS_futex, &lock->state, FUTEX_WAKE_PRIVATE, 1);
}

void lock_acquire_for_fork(struct lock *lock, bool waits) {
    if (lock_is_mine(lock)) {
        atomic_fetch_add_explicit(&lock->state, LOCK_KEPT, memory_order_relaxed);
        return;
    }
    if (waits) {
        lock_acquire_in_any_order(lock);
    } else if (!lock_try(lock)) {
        return;
    }
    atomic_fetch_or_explicit(&lock->state, LOCK_FORK, memory_order_relaxed);
}

void lock_acquire_unless_forking(struct lock *lock) {
    if (lock_is_mine(lock)) {
        lock_acquire_for_fork(lock, false);
        return;
    }
    while (!lock_try(lock)) {
        if ((atomic_load_explicit(&lock->state, memory_order_acquire) & LOCK_FORK) != 0) {
            return;
        }
        os_syscall(SYS_sched_yield);
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

void lock_end_fork(struct lock *lock) {
    if (lock_is_mine(lock) && atomic_load_explicit(&lock->state, memory_order_relaxed) < LOCK_KEPT) {
        atomic_fetch_and_explicit(&lock->state, ~(uint64_t)LOCK_FORK, memory_order_relaxed);
    }
}

void lock_release_ended(struct lock *lock) {
    if (!lock_is_mine(lock)) {
        return;
    }
    if (atomic_load_explicit(&lock->state, memory_order_relaxed) >= LOCK_KEPT) {
        atomic_fetch_sub_explicit(&lock->state, LOCK_KEPT, memory_order_relaxed);
    } else {
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

#ifdef CALM_ASSERTIONS

/* Holders have thread pointers as their keys, since some threads of the
 * allocator have no thread-local storage. */
#define MAX_HOLDERS 4096

static struct holder {
    _Atomic(uint64_t) thread;   /* 0: free; otherwise kept for the next thread with this pointer */
    uint16_t locks[LOCK_RANKS]; /* held locks of each rank; only the thread accesses it */
} holders[MAX_HOLDERS];

/* Returns the calling thread's holder, or NULL if there are too many
 * threads. */
static struct holder *find_holder(void) {
    uint64_t self = lock_self();
    size_t start = thread_slot(MAX_HOLDERS);
    for (size_t i = 0; i < MAX_HOLDERS; i++) {
        struct holder *holder = &holders[(start + i) % MAX_HOLDERS];
        uint64_t thread = atomic_load_explicit(&holder->thread, memory_order_relaxed);
        if (thread == 0) {
            atomic_compare_exchange_strong(&holder->thread, &thread, self);
            thread = thread == 0 ? self : thread;
        }
        if (thread == self) {
            return holder;
        }
    }
    return NULL;
}

void lock_check_rank(const struct lock *lock) {
    const struct holder *holder = find_holder();
    if (holder == NULL || lock->rank == LOCK_UNRANKED || lock_is_mine(lock)) {
        return; /* the owner of a lock that is held over a fork may acquire it once more */
    }
    for (unsigned rank = lock->rank; rank < LOCK_RANKS; rank++) {
        calm_assert(holder->locks[rank] == 0, lock->rank, rank, lock);
    }
}

void lock_note_acquired(const struct lock *lock) {
    struct holder *holder = find_holder();
    if (holder != NULL) {
        holder->locks[lock->rank]++;
    }
}

void lock_note_released(const struct lock *lock) {
    if (lock->rank == LOCK_UNRANKED) {
        return; /* tests release locks of other threads */
    }
    struct holder *holder = find_holder();
    calm_assert(lock_is_mine(lock), lock, lock->state, lock_self());
    if (holder != NULL) {
        calm_assert(holder->locks[lock->rank] > 0, lock, lock->rank);
        holder->locks[lock->rank]--;
    }
}

void lock_ranks_after_fork(void) {
    for (size_t i = 0; i < MAX_HOLDERS; i++) {
        if (atomic_load_explicit(&holders[i].thread, memory_order_relaxed) != lock_self()) {
            memset(holders[i].locks, 0, sizeof holders[i].locks);
        }
    }
}

#endif
