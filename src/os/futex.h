/*
 * Sleeping on a word, and waking the threads that sleep on it. Preserves errno; allocates nothing; needs no
 * thread-local storage. Between the threads of one process.
 *
 * Every wait with a timeout is one of these, and every time that such a wait is compared with comes from
 * os/clock.h: a test that replaces both drives the threads' time.
 */
#ifndef CALM_OS_FUTEX_H
#define CALM_OS_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while the word is seen, at most so long; 0 ns: for as long as it takes. May return early. */
void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns);

void futex_wake_all(_Atomic(uint32_t) *word);

/* What a loop that waits for another CPU does between two looks. */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    __asm__ volatile("yield");
#endif
}

#endif
