/*
 * The thread pointer, and what the C library keeps at an offset from it: the area that it registered for
 * restartable sequences (rseq(2)). Preserves errno; allocates nothing.
 */
#ifndef CALM_OS_RSEQ_H
#define CALM_OS_RSEQ_H

#include "os/random.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* linux/rseq.h; the signature that glibc registers on x86-64 */
#define RSEQ_CPU_ID     4
#define RSEQ_CS         8
#define RSEQ_UNREGISTER 1
#define RSEQ_SIGNATURE  0x53053053

static inline void *thread_pointer(void) {
    void *pointer;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(pointer));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
    return pointer;
}

/* A number below `count` that goes with the calling thread, by Fibonacci hashing of its thread pointer.
 * Several threads may have the same. */
static inline unsigned thread_slot(unsigned count) {
    uint64_t hash = (uint64_t)(uintptr_t)thread_pointer() * RANDOM_GOLDEN_RATIO;
    return (unsigned)((hash >> 32) * count >> 32);
}

/*
 * Offsets from the thread pointer, the same for every thread. A virtual CPU number (mm_cid, Linux 6.3) is
 * below both the CPUs and the threads of the process, and like a CPU's number belongs to one running thread
 * at a time.
 */
struct rseq_offsets {
    bool usable;
    ptrdiff_t area;
    uint32_t area_bytes;  /* as registered */
    ptrdiff_t cpu_number; /* of a virtual CPU where there are those, else of a CPU: uint32_t */
    ptrdiff_t node;       /* uint32_t; 0 where the kernel does not say */
};

/* Any thread. Not usable where the C library registers no areas (before glibc 2.35, musl). */
struct rseq_offsets rseq_find(void);

/* Once, at the start: whether the kernel lets this process call rseq_restart_all. */
bool rseq_can_restart(void);

/*
 * Restarts every restartable sequence that runs on any CPU of this process, and orders memory with it: once
 * it returns true, no sequence is under way that began before. Costs an interrupt for each other CPU that
 * runs the process. False where the kernel cannot, or may not be asked. Any thread.
 */
bool rseq_restart_all(void);

#endif
