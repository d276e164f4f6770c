/*
 * Waiting between the threads of one process: a thread sleeps on a word, wakes
 * the threads that sleep on it, or spins. The functions preserve errno,
 * allocate nothing, and need no thread-local storage.
 *
 * Every wait with a timeout is a futex_wait, and its deadline comes from
 * os/clock.h. A test that replaces both files therefore controls the threads'
 * time. The helper thread calls all of these functions. A lock (os/lock.h)
 * waits without a timeout, and calls only cpu_relax.
 */
#ifndef CALM_OS_FUTEX_H
#define CALM_OS_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while the word equals `seen`, for at most `ns`; 0 ns means without a
 * limit. May return early. */
void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns);

void futex_wake_all(_Atomic(uint32_t) *word);

/*
 * Waits between two reads of a loop that waits for another CPU. On x86-64 the
 * wait takes 40 to 140 cycles since Skylake. No later instruction begins before
 * the wait is over.
 *
 * A pause instruction alone is not enough: on an AMD EPYC, a contended lock
 * then takes nearly twice as long. It seems that the next read, or the exchange
 * behind it, begins speculatively during the pause and takes the cache line
 * from its owner.
 */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
    __builtin_ia32_lfence();
#else
    __asm__ volatile("isb"); /* takes tens of ns; yield is a nop on cores that run one thread */
#endif
}

#endif
