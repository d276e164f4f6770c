/*
 * The core, the cache and the socket that CPUs share. The server calls
 * these functions when it chooses its CPU.
 *
 * `root` stands for "/", so that tests can build other machines;
 * TOPOLOGY_MACHINE is the machine's own. The functions read files of /sys. They
 * are thread-safe, preserve errno, allocate nothing, need no thread-local
 * storage, and take up to 6 KiB of stack.
 *
 * Source: "NextGen-Malloc" (HotOS 2023), section 3.2, "Type of Core to Offload
 * to".
 */
#ifndef CALM_OFFLOAD_TOPOLOGY_H
#define CALM_OFFLOAD_TOPOLOGY_H

#include "os/cpus.h"

#define TOPOLOGY_MACHINE ""

/* The place of a CPU in the machine. Two CPUs share the parts that have equal
 * numbers. If /sys does not describe the machine, each CPU has a core of its
 * own, and all CPUs of a socket share a cache. */
struct cpu_site {
    uint32_t core;   /* the lowest hyperthread of the core */
    uint32_t cache;  /* the lowest CPU that shares the last-level cache; MAX_CPUS + socket if unknown */
    uint32_t socket; /* the package, as the kernel numbers it; 0 if unknown */
};

struct cpu_site topology_site(const char *root, unsigned cpu);

/* Stores the hyperthreads of a CPU's core, including the CPU itself. If /sys
 * does not list them, returns false and stores only the CPU. */
bool topology_siblings(const char *root, unsigned cpu, struct cpu_set *siblings);

#endif
