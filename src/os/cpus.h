/*
 * CPUs: sets of CPUs, the CPUs that a thread may run on, the CPUs that the
 * machine may have, and the number of CPUs that the process uses (an average
 * over about the last second).
 *
 * The functions are thread-safe if each caller has storage of its own. They
 * preserve errno, allocate nothing, and need no thread-local storage. A set
 * takes 1 KiB of stack. All functions but the operations on sets make system
 * calls.
 *
 * The arenas of both allocators sample the number of CPUs in use on their
 * slow paths, by the process's CPU clock. Signals, timers and threads belong to
 * the program, so the sampling uses none.
 */
#ifndef CALM_OS_CPUS_H
#define CALM_OS_CPUS_H

#include <stdbool.h>
#include <stdint.h>

/* The largest number of CPUs that Linux can be built for: NR_CPUS of x86-64
 * with MAXSMP. */
#define MAX_CPUS 8192

/* CPUs by number, in the kernel's format: each word has 64 CPUs, the lowest in
 * the lowest bit. All zero is the empty set. */
struct cpu_set {
    uint64_t words[MAX_CPUS / 64];
};

static inline bool cpu_set_has(const struct cpu_set *set, unsigned cpu) {
    return cpu < MAX_CPUS && (set->words[cpu / 64] >> cpu % 64 & 1) != 0;
}

/* Adds a CPU. A number that is too large is ignored. */
static inline void cpu_set_add(struct cpu_set *set, unsigned cpu) {
    if (cpu < MAX_CPUS) {
        set->words[cpu / 64] |= (uint64_t)1 << cpu % 64;
    }
}

unsigned cpu_set_count(const struct cpu_set *set);

/* Returns the lowest CPU of the set that is not below `from`, or MAX_CPUS if
 * there is none. */
unsigned cpu_set_next(const struct cpu_set *set, unsigned from);

/* Reads a file with a list of CPUs such as "0-3,8-11". If it lists none,
 * returns false and stores the empty set. */
bool cpu_set_read(struct cpu_set *set, const char *path);

/* Stores the online CPUs that a thread may run on. Thread 0 is the caller; the
 * process's number is that of its first thread. Returns the number of CPUs that
 * the kernel could have, a multiple of 64. If the kernel refuses, returns 0 and
 * stores the empty set. */
unsigned cpu_affinity(int thread, struct cpu_set *set);

/* Returns the number of CPUs that the calling thread may run on, or 1 if the
 * kernel refuses. */
unsigned cpu_affinity_count(void);

/* Binds the calling thread to one CPU. If the kernel refuses, returns false and
 * changes nothing: the CPU is offline, does not exist, or is not in the control
 * group's cpuset. */
bool cpu_pin(unsigned cpu);

/* Returns a bound above the numbers that the kernel may give to CPUs. On a
 * kernel that allocates its sets of CPUs by size, the bound exceeds the highest
 * number by less than the bits of a machine word. Takes one system call. */
unsigned cpus_possible(void);

/* Returns the exact bound that /sys lists if it agrees with /proc. Otherwise
 * returns the bound of cpus_possible. Takes a few more system calls than
 * cpus_possible. */
unsigned cpus_listed(void);

/* Returns a bound above the numbers of NUMA nodes, or 1 if /sys lists none. */
unsigned nodes_possible(void);

/* ---- how many the process uses ---- */

/* The state of a sampler. All zero is the initial state. The caller serializes
 * its samples. */
struct cpu_usage {
    uint64_t sampled_wall_ns; /* 0: there was no sample */
    uint64_t sampled_cpu_ns;
    double cpus;
};

/*
 * Returns the number of CPUs that the process used, on average between the last
 * two samples, which are at least one second apart. Before the first full
 * second has passed, returns the number of CPUs in the affinity mask.
 *
 * Unless a second has passed, only reads a clock, which takes no system call.
 * Restarts the sampling if a clock cannot be read or went backwards. Preserves
 * errno.
 */
double cpu_usage_sample(struct cpu_usage *usage);

#endif
