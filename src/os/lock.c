#include "os/lock.h"

#include "os/syscall.h"

#include <linux/futex.h>

/* About half a microsecond: longer than a heap's short sections, far shorter than a sleep and a wake. */
#define SPINS 64

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

void lock_acquire_contended(struct lock *lock) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&lock->state, memory_order_relaxed) == LOCK_FREE && lock_try(lock)) {
            return;
        }
        relax();
    }
    /* From here on the lock is taken as LOCK_WAITED, since others may sleep too: a needless wake, never a
     * lost one. */
    while (atomic_exchange_explicit(&lock->state, LOCK_WAITED, memory_order_acquire) != LOCK_FREE) {
        os_syscall(SYS_futex, (long)&lock->state, FUTEX_WAIT_PRIVATE, LOCK_WAITED, 0, 0, 0);
    }
}

void lock_wake(struct lock *lock) {
    os_syscall(SYS_futex, (long)&lock->state, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
}
