/*
 * How many CPUs this process uses, averaged over about the last second.
 *
 * Sampled lazily by whoever is on a slow path anyway, from the process's own CPU clock: no signal, no timer
 * and no thread, which all belong to the application.
 */
#ifndef CALM_OS_CPU_USAGE_H
#define CALM_OS_CPU_USAGE_H

#include <stddef.h>
#include <stdint.h>

/* All zero is the valid initial state. One sampler at a time: the caller serializes. */
struct cpu_usage {
    uint64_t sampled_wall_ns; /* zero: never sampled */
    uint64_t sampled_cpu_ns;
    double cpus;
};

/*
 * CPUs used: the average since the last sample that is at least one second old; until a first full second has
 * passed, all CPUs of the affinity mask. Costs one clock read (no system call) unless a second has passed.
 * A clock that cannot be read, or went backwards, restarts the sampling. Preserves errno.
 */
double cpu_usage_sample(struct cpu_usage *usage);

/* A thread's affinity mask. Raw, as the kernel has it, of up to 8192 CPUs. */
struct cpu_mask {
    unsigned long words[1024 / sizeof(unsigned long)];
    size_t bytes; /* that the kernel filled; 0 if it cannot be read */
};

/* The calling thread's. Preserves errno. */
void cpu_mask_read(struct cpu_mask *mask);

/* CPUs in the calling thread's affinity mask; 1 if it cannot be read. Preserves errno. */
unsigned cpu_affinity_count(void);

#endif
