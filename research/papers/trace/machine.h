/* A model of what a machine's caches and TLBs miss: each CPU has an L1 and an L2 cache for data and a TLB of
 * two levels of its own, and all share a last level cache. A store takes the line from every other CPU's
 * caches, as MESI does it: what is lost so is told apart from what a cache had no room for. Pure: addresses
 * in, counts out; called by the plugin, by the replay of layouts, and by the tests.
 *
 * Replacement is by recency, exactly. L2 has all that L1 has; the shared cache is filled by each line that
 * any CPU fetches or writes back, and what it drops stays with the CPUs that have it. A line that another CPU
 * has is no miss of the shared cache: it is where it would be looked up. There is no prefetcher and no
 * instruction cache, pages are 4 KiB, and an address stands for itself: memory that is unmapped and mapped
 * again is the same to it. */
#ifndef CALM_TRACE_MACHINE_H
#define CALM_TRACE_MACHINE_H

#include <stdbool.h>
#include <stdint.h>

enum { MACHINE_LINE_BYTES = 64, MACHINE_PAGE_BYTES = 4096, MACHINE_CPUS = 128 };

/* The number of sets is a power of two. */
struct cache_shape {
    uint32_t sets;
    uint32_t ways;
};

struct machine_shape {
    struct cache_shape l1;
    struct cache_shape l2;
    struct cache_shape llc;
    struct cache_shape tlb;  /* in pages */
    struct cache_shape stlb; /* the TLB's second level */
    /* A page belongs to the node of the CPU that touches it first. With 0, there are no nodes. */
    uint32_t nodes;
};

/* The machine of the NextGen-Malloc paper has 16 Cortex-A72: by its reference manual, a TLB for data of 32
 * entries, fully associative, one behind it of 1,024, 4 ways, and a shared cache of up to 2 MiB, 16 ways. Its
 * L1 of 2 ways and 32 KiB is 8 ways here, and the private L2 between is any newer machine's. */
extern const struct machine_shape machine_default;

enum { MACHINE_LOAD, MACHINE_STORE, MACHINE_KINDS };

/* Of one CPU, by kind. An access that crosses into another line or page may miss twice. */
struct machine_counts {
    uint64_t accesses[MACHINE_KINDS];
    uint64_t l1_misses[MACHINE_KINDS];
    uint64_t l2_misses[MACHINE_KINDS];  /* of those: not in this CPU's own caches */
    uint64_t llc_misses[MACHINE_KINDS]; /* of those: neither shared nor with another CPU */
    uint64_t coherence[MACHINE_KINDS];  /* of l2_misses: another CPU's store had taken the line away */
    uint64_t transfers[MACHINE_KINDS];  /* of l2_misses: another CPU has the line, changed */
    uint64_t upgrades;                  /* stores that had the line, but had to take it from others */
    uint64_t invalidations; /* all stores that took the line from others: the upgrades and misses */
    uint64_t tlb_misses[MACHINE_KINDS];
    uint64_t walks[MACHINE_KINDS]; /* of those: the second level missed too */
    /* Of l2_misses and upgrades: the CPU that fetched the line or took it from others last, or one that loses
     * it now, belongs to another node. */
    uint64_t remote_lines[MACHINE_KINDS];
    uint64_t remote_pages[MACHINE_KINDS]; /* of the other l2_misses: no CPU has the line; the page does */
};

struct machine;

/* NULL, where memory is short. */
struct machine *machine_new(const struct machine_shape *shape);
void machine_delete(struct machine *machine);

/* CPU n belongs to node n modulo their number, until it gets another. */
void machine_set_node(struct machine *machine, unsigned cpu, unsigned node);

/* One load or store of some bytes, at least one, by a CPU below MACHINE_CPUS. Memory that is short ends the
 * process. */
void machine_access(struct machine *machine, unsigned cpu, uint64_t address, uint64_t bytes, bool is_store);

/* Counts from here on; caches keep what they have. */
void machine_clear_counts(struct machine *machine);

const struct machine_counts *machine_counts(const struct machine *machine, unsigned cpu);

/* For a CPU that another thread begins on: what it counted before is the last one's. */
void machine_clear_cpu(struct machine *machine, unsigned cpu);

#endif
