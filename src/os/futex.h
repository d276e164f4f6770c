/*
 * Sleeping on a word, and waking who sleeps on it. Preserves errno; allocates nothing; needs no thread-local
 * storage. Between the threads of one process.
 */
#ifndef CALM_OS_FUTEX_H
#define CALM_OS_FUTEX_H

#include "os/syscall.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

/* Sleeps while the word is seen, at most so long; 0 ns: for as long as it takes. May return early. */
static inline void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns) {
    struct timespec most = {(time_t)(ns / 1000000000U), (long)(ns % 1000000000U)};
    os_syscall(SYS_futex, (long)word, FUTEX_WAIT_PRIVATE, (long)seen, ns == 0 ? 0 : (long)&most, 0, 0);
}

static inline void futex_wake_all(_Atomic(uint32_t) *word) {
    os_syscall(SYS_futex, (long)word, FUTEX_WAKE_PRIVATE, INT_MAX, 0, 0, 0);
}

/* What a loop that waits for another CPU does between two looks. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

#endif
