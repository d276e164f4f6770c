/*
 * Where the CPUs of the machine lie and how busy they are: which a thread may run on, which share a core, a
 * cache and a socket, which are idle, and on which this process's threads run.
 *
 * What reads files takes the folder that stands for "/" (TOPOLOGY_MACHINE is the machine's own), so that
 * tests can build other machines. All of it preserves errno, allocates nothing, needs no thread-local
 * storage, and takes up to 12 KiB of stack; the larger pieces lie where the caller has them. Nothing here is
 * shared: threads may call any of it at the same time, each with storage of its own. For rare looks: every
 * one is system calls.
 *
 * Source: "NextGen-Malloc" (HotOS 2023), section 3.2, "Type of Core to Offload to".
 */
#ifndef CALM_OS_TOPOLOGY_H
#define CALM_OS_TOPOLOGY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TOPOLOGY_MACHINE ""

/* The most CPUs that Linux can be built for: NR_CPUS of x86-64 with MAXSMP. */
#define CPUS_MOST 8192

/* CPUs by number. All zero is the empty set. As the kernel has it: 64 CPUs a word, the lowest first. */
struct cpu_set {
    uint64_t words[CPUS_MOST / 64];
};

static inline bool cpu_set_has(const struct cpu_set *set, unsigned cpu) {
    return cpu < CPUS_MOST && (set->words[cpu / 64] >> cpu % 64 & 1) != 0;
}

/* A number that there cannot be is left out. */
static inline void cpu_set_add(struct cpu_set *set, unsigned cpu) {
    if (cpu < CPUS_MOST) {
        set->words[cpu / 64] |= (uint64_t)1 << cpu % 64;
    }
}

unsigned cpu_set_count(const struct cpu_set *set);

/* The lowest CPU of the set that is not below `from`; CPUS_MOST if there is none. */
unsigned cpu_set_next(const struct cpu_set *set, unsigned from);

/* ---- threads and CPUs ---- */

/* The CPUs that a thread may run on and that are online; 0 is the caller, and the process's number its first
 * thread. False, and the empty set, if the kernel does not say. */
bool cpu_affinity(int thread, struct cpu_set *set);

/* Binds the calling thread to one CPU. False, and nothing changed, if the kernel refuses: the CPU is offline,
 * outside of the control group's cpuset, or there is none such. */
bool cpu_pin(unsigned cpu);

/* ---- where CPUs lie ---- */

/*
 * What a CPU belongs to; two CPUs share what has the same number. Where the machine does not say, it is taken
 * for plain: each CPU is a core of its own, and all that is in one socket shares a cache.
 */
struct cpu_site {
    uint32_t core;   /* the lowest of the hyperthreads that it is one of */
    uint32_t cache;  /* the lowest CPU that shares its last-level cache; CPUS_MOST + socket if unknown */
    uint32_t socket; /* the package, as the kernel numbers it; 0 if unknown */
};

struct cpu_site topology_site(const char *root, unsigned cpu);

/* The hyperthreads of a CPU's core, the CPU itself among them. False if the machine does not say: the CPU
 * alone. */
bool topology_siblings(const char *root, unsigned cpu, struct cpu_set *siblings);

/* ---- how busy CPUs are ---- */

/* What each CPU has done since the machine's start, in ticks of 10 ms. All zero is the look at that start.
 * Memory for CPUs that there are not is not touched. */
struct cpu_times {
    uint32_t cpus; /* those of lower numbers are below; one that was offline has no ticks */
    struct {
        uint64_t idle;  /* also while it waits for a disk */
        uint64_t total; /* also what a hypervisor gave to others */
    } of[CPUS_MOST];
};

/* False, and the look at the machine's start, if there is nothing to read. */
bool cpu_times_look(const char *root, struct cpu_times *times);

#define CPU_IDLE_UNKNOWN 255

/* Of the time between two looks, how much a CPU was idle: 0 to 100, or CPU_IDLE_UNKNOWN for a CPU that was
 * not seen, or looks less than 50 ms apart, of which ticks say nothing. Pure. */
unsigned cpu_idle_percent(const struct cpu_times *before, const struct cpu_times *after, unsigned cpu);

/* ---- how busy this process is, and where ---- */

#define TASKS_MOST 256

/* CPU time of the process's threads since each began. All zero is the look before there were any. */
struct task_times {
    uint32_t count;
    struct {
        int32_t thread;
        uint32_t cpu;   /* that it last ran on */
        uint64_t ticks; /* of 10 ms */
        bool running;   /* it runs or could, at the moment of the look */
    } tasks[TASKS_MOST];
};

/* The first TASKS_MOST threads that the kernel lists, which are those that have lived longest, without one
 * (0: none). False, and the look before, if there is nothing to read. */
bool task_times_look(const char *root, int without_thread, struct task_times *times);

/*
 * The CPUs on which the process's threads ran most between two looks, the busiest first: at most `most`, and
 * none that had less than a quarter of what the busiest had. A thread counts for the CPU where it was seen
 * last, and one that runs at the second look as having run for a tick, so that there is an answer before the
 * first tick. Returns how many CPUs. Pure.
 */
size_t task_busiest_cpus(const struct task_times *before, const struct task_times *after, uint32_t *cpus,
                         size_t most);

#endif
