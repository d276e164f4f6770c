#include "os/lock.h"

#include "os/futex.h"
#include "os/syscall.h"

#include <linux/futex.h>
#include <string.h>

/*
 * The longest wait of a thread that spins before it sleeps. All waits together are twice that, 10 to 60 us on
 * x86-64 since Skylake and Zen 2: several times a heap's section, so that where every CPU runs a thread that
 * uses the heap, few pay for a sleep and a wake-up. Each read of the lock takes its cache line from the
 * owner, and if it is free, the lines of the heap go with it. So each wait is as long as all before it
 * together: the owner goes on with all lines in its own cache, and a thread overlooks at most half of its
 * wait.
 */
#define MAX_PAUSES 512

/* The kernel compares the first 32 bits: those with the flags. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the flags are in a lock's first bytes");

/* The list of contended locks, by next_contended, which is the end's address in the last one. */
static struct lock end_of_contended;
static _Atomic(struct lock *) contended = &end_of_contended;

/*
 * Before a thread sleeps. Another thread may find next_contended set before the lock is on the list, and
 * sleep. No wake-up is lost if a signal handler forks here, since the linking thread has neither been woken
 * nor released the lock.
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

/* Whether the caller is the forking thread, which holds the lock and need not wait for it. */
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
    /* From here on this thread acquires the lock with LOCK_WAITED set, since other threads may sleep too: a
     * wake-up may be needless, but none is lost. */
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

#ifdef CALM_ASSERTIONS

/* By thread pointer, since some threads of the allocator have no thread-local storage. */
#define MAX_HOLDERS 4096

static struct holder {
    _Atomic(uint64_t) thread;   /* 0: not in use; kept for the next thread of that pointer */
    uint16_t locks[LOCK_RANKS]; /* held, by rank; read and written by the thread alone */
} holders[MAX_HOLDERS];

/* The calling thread's; NULL if there are too many. */
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
        return; /* one that is held over a fork may be acquired once more */
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
