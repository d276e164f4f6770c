/*
 * Waiting: sleeping on a word, waking the threads that sleep on it, and spinning. Between the threads of one
 * process. Preserves errno; allocates nothing; needs no thread-local storage.
 *
 * Every wait with a timeout is one of these, and every time that such a wait is compared with comes from
 * os/clock.h: a test that replaces both drives the threads' time. Called by the helper thread and by offload
 * mode; os/lock.h waits without a timeout and uses only cpu_relax.
 */
#ifndef CALM_OS_FUTEX_H
#define CALM_OS_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

/* Sleeps while the word equals seen, at most for ns; 0 ns: without a limit. May return early. */
void futex_wait(_Atomic(uint32_t) *word, uint32_t seen, uint64_t ns);

void futex_wake_all(_Atomic(uint32_t) *word);

/*
 * Between two reads of a loop that waits for another CPU: on x86-64, 40 to 140 cycles since Skylake. No later
 * instruction begins before it is over. With a pause alone, on an AMD EPYC, a contended lock takes nearly
 * twice the time: as it seems, the next read, or the exchange after it, begins speculatively during the
 * pause, and takes the cache line from its owner.
 */
static inline void cpu_relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
    __builtin_ia32_lfence();
#else
    __asm__ volatile("isb"); /* tens of ns; yield is a nop on cores that run one thread */
#endif
}

#endif
