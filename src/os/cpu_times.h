/*
 * How busy each CPU of the machine is, from two samples of /proc/stat. Called by the server of offload mode
 * when it chooses its CPU.
 *
 * Thread-safe, each with storage of its own; preserves errno; allocates nothing; needs no thread-local
 * storage; takes up to 4 KiB of stack.
 */
#ifndef CALM_OS_CPU_TIMES_H
#define CALM_OS_CPU_TIMES_H

#include "os/cpus.h"

/* The work of each CPU since the machine's start, in ticks of 10 ms. All zero is the sample at that start.
 * The memory of CPUs that do not exist is not touched. */
struct cpu_times {
    uint32_t cpus; /* those of lower numbers are below; one that was offline has no ticks */
    struct {
        uint64_t idle;  /* also while it waits for a disk */
        uint64_t total; /* also what a hypervisor gave to others */
    } of[MAX_CPUS];
};

/* root stands for "/". False, and the sample at the machine's start, if there is nothing to read. */
bool cpu_times_sample(const char *root, struct cpu_times *times);

#define CPU_IDLE_UNKNOWN 255

/* The part of the time between two samples that a CPU was idle, 0 to 100 per cent. CPU_IDLE_UNKNOWN for a CPU
 * that does not exist, or samples less than 50 ms apart, of which ticks say nothing. Pure. */
unsigned cpu_times_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu);

#endif
