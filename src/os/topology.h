/*
 * What CPUs share: a core, a cache, a socket. Called by the server of offload mode when it chooses its CPU.
 *
 * root stands for "/" (TOPOLOGY_MACHINE is the machine's own), so that tests can build other machines. Reads
 * files of /sys. Thread-safe; preserves errno; allocates nothing; needs no thread-local storage; takes up to
 * 6 KiB of stack.
 *
 * Source: "NextGen-Malloc" (HotOS 2023), section 3.2, "Type of Core to Offload to".
 */
#ifndef CALM_OS_TOPOLOGY_H
#define CALM_OS_TOPOLOGY_H

#include "os/cpus.h"

#define TOPOLOGY_MACHINE ""

/*
 * What a CPU belongs to; two CPUs share what has the same number. Where the machine does not say, each CPU is
 * taken for a core of its own, and all CPUs of a socket for sharing a cache.
 */
struct cpu_site {
    uint32_t core;   /* the lowest of the hyperthreads that it is one of */
    uint32_t cache;  /* the lowest CPU that shares its last-level cache; MAX_CPUS + socket if unknown */
    uint32_t socket; /* the package, as the kernel numbers it; 0 if unknown */
};

struct cpu_site topology_site(const char *root, unsigned cpu);

/* The hyperthreads of a CPU's core, the CPU itself among them. False if the machine does not say: the CPU
 * alone. */
bool topology_siblings(const char *root, unsigned cpu, struct cpu_set *siblings);

#endif
