/*
 * CPUs: sets of them, those that a thread may run on, how many there may be, and how many this process uses,
 * averaged over about the last second.
 *
 * Thread-safe, each with storage of its own; preserves errno; allocates nothing; needs no thread-local
 * storage. A set takes 1 KiB of stack. All but the operations on sets are system calls. The CPUs in use are
 * sampled lazily, on slow paths of both allocators' governors, from the process's own CPU clock: no signal,
 * no timer and no thread, which all belong to the application.
 */
#ifndef CALM_OS_CPUS_H
#define CALM_OS_CPUS_H

#include <stdbool.h>
#include <stdint.h>

/* The number of CPUs that Linux can be built for at most: NR_CPUS of x86-64 with MAXSMP. */
#define MAX_CPUS 8192

/* CPUs by number. All zero is the empty set. As the kernel has it: 64 CPUs a word, the lowest first. */
struct cpu_set {
    uint64_t words[MAX_CPUS / 64];
};

static inline bool cpu_set_has(const struct cpu_set *set, unsigned cpu) {
    return cpu < MAX_CPUS && (set->words[cpu / 64] >> cpu % 64 & 1) != 0;
}

/* Ignores numbers that are too large. */
static inline void cpu_set_add(struct cpu_set *set, unsigned cpu) {
    if (cpu < MAX_CPUS) {
        set->words[cpu / 64] |= (uint64_t)1 << cpu % 64;
    }
}

unsigned cpu_set_count(const struct cpu_set *set);

/* The lowest CPU of the set that is not below `from`; MAX_CPUS if there is none. */
unsigned cpu_set_next(const struct cpu_set *set, unsigned from);

/* The CPUs in a file with a list such as "0-3,8-11". False, and the empty set, if there are none. */
bool cpu_set_read(struct cpu_set *set, const char *path);

/* The CPUs that a thread may run on and that are online; 0 is the caller, and the process's number its first
 * thread. Returns the number of CPUs that the kernel could have, in whole words; 0, and the empty set, if it
 * does not say. */
unsigned cpu_affinity(int thread, struct cpu_set *set);

/* CPUs that the calling thread may run on; 1 if the kernel does not say. */
unsigned cpu_affinity_count(void);

/* Binds the calling thread to one CPU. False, and nothing changed, if the kernel refuses: the CPU is offline,
 * outside of the control group's cpuset, or does not exist. */
bool cpu_pin(unsigned cpu);

/* More than the highest number that the kernel may give a CPU: by less than a machine word has bits on a
 * kernel that allocates its sets of CPUs by size. One system call. */
unsigned cpus_possible(void);

/* The same from /sys, where it is exact, if that agrees with /proc: a few system calls more. */
unsigned cpus_listed(void);

/* NUMA nodes likewise; 1 if the kernel does not say. */
unsigned nodes_possible(void);

/* ---- how many the process uses ---- */

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
