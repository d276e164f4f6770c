/*
 * On which CPUs this process's threads run, from two samples of /proc/self/task. Called by the server of
 * offload mode when it chooses its CPU.
 *
 * Thread-safe, each with storage of its own; preserves errno; allocates nothing; needs no thread-local
 * storage; takes up to 8 KiB of stack.
 */
#ifndef CALM_OS_TASK_TIMES_H
#define CALM_OS_TASK_TIMES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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
 * (0: none). root stands for "/". False, and the sample before, if there is nothing to read. */
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
