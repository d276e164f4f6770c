/*
 * Which CPU a thread runs on, and how many there may be. Preserves errno; allocates nothing.
 */
#ifndef CALM_OS_CPUS_H
#define CALM_OS_CPUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* One more than the highest number that the kernel may give a CPU. */
unsigned cpus_possible(void);

/* NUMA nodes likewise; 1 where there is no word of them. */
unsigned nodes_possible(void);

/*
 * Where the C library has registered the threads for restartable sequences (rseq(2)): offsets from the thread
 * pointer. A virtual CPU number (mm_cid, Linux 6.3) is below both the CPUs and the threads of the process,
 * and like a CPU's number belongs to one running thread at a time.
 */
struct rseq_place {
    bool usable;
    ptrdiff_t area;
    ptrdiff_t cpu_number; /* of a virtual CPU where there are those, else of a CPU: uint32_t */
    ptrdiff_t node;       /* uint32_t; 0 where the kernel does not say */
};

struct rseq_place rseq_find(void);

/*
 * Restarts every restartable sequence that runs on any CPU of this process, and orders memory with it: once
 * it returns true, no sequence is under way that began before. Costs an interrupt for each other CPU that
 * runs the process.
 */
bool rseq_restart_all(void);

static inline void *thread_pointer(void) {
    void *pointer;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(pointer));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
    return pointer;
}

#endif
