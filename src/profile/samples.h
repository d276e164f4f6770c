/*
 * The table of samples: for each call stack the sums of what it allocated, of what is in use, of what was in
 * use at the peak, and of how long blocks lived; and the sampled blocks that are in use.
 *
 * An instance without globals, in address space of its own. Blocks are removed when they are freed, stacks
 * never. Both are bounded: what does not fit is dropped, and counted.
 *
 * The sums at the peak are exact, at a cost that does not grow with the number of stacks: each new peak
 * begins an epoch, and the first change of a stack in an epoch saves its sum from before. A stack that has
 * not changed since the peak has that sum still.
 *
 * A process outside reads the table without a lock (samples_layout.h): a stack whose sequence number is even,
 * and the same before and after, was not changed meanwhile.
 *
 * Thread-safe, by one lock, under which signals are blocked: a handler that allocates cannot meet a lock that
 * its own thread holds. Called by heap_profile.c and pprof.c. Preserves errno; allocates nothing.
 */
#ifndef CALM_PROFILE_SAMPLES_H
#define CALM_PROFILE_SAMPLES_H

#include "os/address_range.h"
#include "os/lock.h"
#include "os/vm.h"
#include "profile/sampling.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define MAX_SAMPLE_DEPTH  64
#define MAX_SAMPLE_STACKS ((size_t)1 << 16)
#define MAX_SAMPLE_BLOCKS ((size_t)1 << 17) /* each may take a page more than it needs */

/* Sums of weights; and of times, each multiplied by the block's weight. */
struct sample_sums {
    struct sample_weight allocated;
    struct sample_weight in_use;
    struct sample_weight at_peak;
    uint64_t lifetime_ns; /* of freed blocks: from allocation to free */
    uint64_t age_ns;      /* of blocks in use: from allocation until now */
};

struct sample_stack {
    _Atomic(uint32_t) sequence; /* odd while it is being changed */
    uint32_t first;             /* of its addresses */
    uint32_t depth;
    uint32_t next; /* with the same low bits of the hash; 0: none */
    uint64_t hash;
    struct sample_weight allocated;
    struct sample_weight in_use;
    struct sample_weight at_peak; /* if the stack has changed since the peak, else in_use is */
    uint64_t epoch;               /* of the last change */
    double lifetimes;             /* sum over freed blocks of count times nanoseconds */
    double births;                /* sum over blocks in use of count times the clock's nanoseconds */
};

struct sample_block {
    uintptr_t block;
    struct sample_weight weight;
    uint64_t born_ns;
    uint32_t stack;
    uint32_t next; /* with the same low bits of the hash, or free; 0: none */
};

struct samples {
    struct lock lock;             /* held around fork, too: the child has a copy of the table */
    struct sample_tables *tables; /* samples.c: the arrays, of which the ranges say how much is committed */
    struct address_range stacks;
    struct address_range addresses;
    struct address_range blocks;
    _Atomic(uint32_t) stacks_end; /* number 0 is none; those below the end are complete */
    uint32_t addresses_end;
    uint32_t blocks_end; /* number 0 is none */
    uint32_t blocks_free;
    _Atomic(uint32_t) live;
    _Atomic(uint64_t) dropped;
    uint64_t in_use_bytes; /* of all stacks */
    uint64_t peak_bytes;
    uint64_t peak_ns;    /* when it was reached */
    uint64_t peak_epoch; /* counts peaks */
};

/* All zero before. False if there is no address space. */
bool samples_init(struct samples *samples);

/* A block with this call stack, the innermost address first, was sampled. now_ns: of a monotonic clock. False
 * if there is no room. */
bool samples_add(struct samples *samples, const void *block, struct sample_weight weight,
                 const uintptr_t *addresses, size_t depth, uint64_t now_ns);

/* The block is about to be freed. Returns whether it was sampled. */
bool samples_remove(struct samples *samples, const void *block, uint64_t now_ns);

/* Counts a sample that could not be taken. */
void samples_drop(struct samples *samples);

/* Whether one more block would fit: an estimate, before the block is there. */
static inline bool samples_have_room(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) < MAX_SAMPLE_BLOCKS - 1;
}

/* Whether any sampled block lives: one load, before a lock. */
static inline bool samples_any_live(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) != 0;
}

/* The number of stacks, which are numbered from 1, and of the addresses of all of them together. */
size_t samples_count(struct samples *samples, size_t *addresses);

/* The sums of a stack now, and its addresses, which never change. */
struct sample_sums samples_read(struct samples *samples, size_t stack, uint64_t now_ns,
                                const uintptr_t **addresses, size_t *depth);

/* Bytes of memory that the table takes. */
size_t samples_bytes(struct samples *samples);

#endif
