/*
 * How busy each CPU of the machine is, and on which CPUs the threads of this
 * process run. Both follow from two samples of CPU times in /proc. The
 * server calls these when it chooses its CPU.
 *
 * The functions are thread-safe if each caller has storage of its own. They
 * preserve errno, allocate nothing, need no thread-local storage, and take up
 * to 8 KiB of stack. `root` stands for "/".
 */
#ifndef CALM_OFFLOAD_CPU_TIMES_H
#define CALM_OFFLOAD_CPU_TIMES_H

#include "os/cpus.h"

#include <stddef.h>

/* ---- CPUs ---- */

/* The work of each CPU since the machine's start, in ticks of 10 ms. All zero
 * is the sample at that start. A sample does not touch the memory of CPUs that
 * do not exist. */
struct cpu_times {
    uint32_t cpus; /* `of` describes the CPUs with lower numbers; a CPU that was offline has no ticks */
    struct {
        uint64_t idle;  /* includes waiting for a disk */
        uint64_t total; /* includes the time that a hypervisor gave to other machines */
    } of[MAX_CPUS];
};

/* Takes a sample. If there is nothing to read, returns false and stores the
 * sample at the machine's start. */
bool cpu_times_sample(const char *root, struct cpu_times *times);

#define CPU_IDLE_UNKNOWN 255

/* Returns the percentage of the time between two samples for which a CPU was
 * idle. Returns CPU_IDLE_UNKNOWN for a CPU that does not exist, and if the
 * samples are less than 50 ms apart, since ticks are too coarse for that.
 * Pure. */
unsigned cpu_times_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu);

/* ---- threads ---- */

#define MAX_TASKS 256

/* CPU time of each of the process's threads since the thread began. All zero is
 * a sample without threads. */
struct task_times {
    uint32_t count;
    struct {
        int32_t thread;
        uint32_t cpu;   /* the CPU that it last ran on */
        uint64_t ticks; /* of 10 ms */
        bool running;   /* it ran, or was able to run, at the moment of the sample */
    } tasks[MAX_TASKS];
};

/* Samples the first MAX_TASKS threads that the kernel lists, except
 * `without_thread` (0: no exception). The kernel lists the oldest threads
 * first. If there is nothing to read, returns false and stores the sample
 * without threads. */
bool task_times_sample(const char *root, int without_thread, struct task_times *times);

/*
 * Stores the CPUs on which the process's threads ran most between two samples,
 * the busiest first. Stores at most `max` CPUs, and leaves out a CPU with less
 * than a quarter of the load of the busiest one. Returns the number of CPUs.
 * Pure.
 *
 * A thread's load counts for the CPU on which it last ran. A thread that is
 * running at the second sample counts as having run for one more tick, so that
 * there is a result before the first tick.
 */
size_t task_times_busiest_cpus(const struct task_times *before, const struct task_times *after,
                               uint32_t *cpus, size_t max);

#endif
