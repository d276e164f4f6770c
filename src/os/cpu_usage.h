/*
 * How many CPUs this process uses, averaged over about the last second.
 *
 * Sampled lazily, on slow paths, from the process's own CPU clock: no signal, no timer and no thread, which
 * all belong to the application. Called by both allocators' governors.
 */
#ifndef CALM_OS_CPU_USAGE_H
#define CALM_OS_CPU_USAGE_H

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

#endif
