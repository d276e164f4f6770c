/*
 * How busy each CPU of the machine is, and on which CPUs this process's threads run: each from two samples of
 * CPU times in /proc. Called by the server of offload mode when it chooses its CPU.
 *
 * Thread-safe, each with storage of its own; preserves errno; allocates nothing; needs no thread-local
 * storage; takes up to 8 KiB of stack. root stands for "/".
 */
#ifndef CALM_OS_CPU_TIMES_H
#define CALM_OS_CPU_TIMES_H

#include "os/cpus.h"

#include <stddef.h>

/* ---- CPUs ---- */

/* The work of each CPU since the machine's start, in ticks of 10 ms. All zero is the sample at that start.
 * The memory of CPUs that do not exist is not touched. */
struct cpu_times {
    uint32_t cpus; /* those of lower numbers are below; one that was offline has no ticks */
    struct {
        uint64_t idle;  /* also while it waits for a disk */
        uint64_t total; /* also what a hypervisor gave to others */
    } of[MAX_CPUS];
};

/* False, and the sample at the machine's start, if there is nothing to read. */
bool cpu_times_sample(const char *root, struct cpu_times *times);

#define CPU_IDLE_UNKNOWN 255

/* The part of the time between two samples that a CPU was idle, 0 to 100 per cent. CPU_IDLE_UNKNOWN for a CPU
 * that does not exist, or samples less than 50 ms apart, of which ticks say nothing. Pure. */
unsigned cpu_times_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu);

/* ---- threads ---- */

#define MAX_TASKS 256

/* CPU time of the process's threads since each began. All zero is the sample before there were any. */
struct task_times {
    uint32_t count;
    struct {
        int32_t thread;
        uint32_t cpu;   /* that it last ran on */
        uint64_t ticks; /* of 10 ms */
        bool running;   /* it runs or could, at the moment of the sample */
    } tasks[MAX_TASKS];
};

/* The first MAX_TASKS threads that the kernel lists, which are those that have lived longest, without one
 * (0: none). False, and the sample before, if there is nothing to read. */
bool task_times_sample(const char *root, int without_thread, struct task_times *times);

/*
 * The CPUs on which the process's threads ran most between two samples, the busiest first: at most max, and
 * none that had less than a quarter of what the busiest had. A thread counts for the CPU where it was seen
 * last, and one that runs at the second sample as having run for a tick, so that there is an answer before
 * the first tick. Returns the number of CPUs. Pure.
 */
size_t task_times_busiest_cpus(const struct task_times *before, const struct task_times *after,
                               uint32_t *cpus, size_t max);

#endif
