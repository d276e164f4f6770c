/*
 * The table of samples. For each call stack it has the sums of what the stack
 * allocated, of what is in use, of what was in use at the peak, and of how long
 * blocks lived. It also has the sampled blocks that are in use.
 *
 * The table is an instance without globals, in address space of its own. Blocks
 * are removed when they are freed, stacks never. Both are bounded. What does
 * not fit is dropped, and counted.
 *
 * The sums at the peak are exact, at a cost that does not grow with the number
 * of stacks. Each new peak begins an epoch, and the first change of a stack in
 * an epoch saves the sum before the change. If a stack has not changed since
 * the peak, its current sum is the one at the peak.
 *
 * A process outside reads the table without a lock (samples_layout.h). It reads
 * a stack's sequence number before and after the stack. If both are equal and
 * even, the stack did not change in between.
 *
 * The functions are thread-safe by one lock. Signals are blocked under it,
 * since a handler that allocates would otherwise wait for a lock of its own
 * thread. heap_profile.c and pprof.c call this file. It preserves errno and
 * allocates nothing.
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

/* Sums of weights, and sums of times. A time is multiplied by the block's
 * weight. */
struct sample_sums {
    struct sample_weight allocated;
    struct sample_weight in_use;
    struct sample_weight at_peak;
    uint64_t lifetime_ns; /* of freed blocks: from allocation to free */
    uint64_t age_ns;      /* of blocks in use: from allocation until now */
};

struct sample_stack {
    _Atomic(uint32_t) sequence; /* odd while the stack is being changed */
    uint32_t first;             /* the index of its first address */
    uint32_t depth;
    uint32_t next; /* the next stack with equal low bits of the hash; 0: none */
    uint64_t hash;
    struct sample_weight allocated;
    struct sample_weight in_use;
    /* Valid if the stack has changed since the peak. Otherwise in_use is the
     * sum at the peak. */
    struct sample_weight at_peak;
    uint64_t epoch;   /* the epoch of the last change */
    double lifetimes; /* sum of count * lifetime in ns, over freed blocks */
    double births;    /* sum of count * time of allocation in ns, over blocks in use */
};

struct sample_block {
    uintptr_t block;
    struct sample_weight weight;
    uint64_t born_ns;
    uint32_t stack;
    uint32_t next; /* the next block with equal low bits of the hash, or the next free one; 0: none */
};

struct samples {
    struct lock lock;             /* also held around fork, since the child has a copy of the table */
    struct sample_tables *tables; /* the arrays (samples.c); the ranges say how much of them is committed */
    struct address_range stacks;
    struct address_range addresses;
    struct address_range blocks;
    _Atomic(uint32_t) stacks_end; /* number 0 is none; the stacks below the end are complete */
    uint32_t addresses_end;
    uint32_t blocks_end; /* number 0 is none */
    uint32_t blocks_free;
    _Atomic(uint32_t) live;
    _Atomic(uint64_t) dropped;
    uint64_t in_use_bytes; /* of all stacks */
    uint64_t peak_bytes;
    uint64_t peak_ns;    /* when the peak was reached */
    uint64_t peak_epoch; /* the number of peaks so far */
};

/* Sets up the table, which is all zero before. Returns false if there is no
 * address space. */
bool samples_init(struct samples *samples);

/* Adds a sampled block with its call stack, the innermost address first.
 * `now_ns` is the time of a monotonic clock. Returns false if there is no
 * room. */
bool samples_add(struct samples *samples, const void *block, struct sample_weight weight,
                 const uintptr_t *addresses, size_t depth, uint64_t now_ns);

/* Called before a block is freed. Returns whether the block was sampled. */
bool samples_remove(struct samples *samples, const void *block, uint64_t now_ns);

/* Counts a sample that was not taken. */
void samples_drop(struct samples *samples);

/* Returns whether one more block would fit. This is an estimate, made before
 * the block is allocated. */
static inline bool samples_have_room(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) < MAX_SAMPLE_BLOCKS - 1;
}

/* Returns whether any sampled block lives. This takes one load, and saves the
 * lock. */
static inline bool samples_any_live(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) != 0;
}

/* Returns the number of stacks, which are numbered from 1. Stores the number of
 * the addresses of all stacks together. */
size_t samples_count(struct samples *samples, size_t *addresses);

/* Returns the sums of a stack now. Stores its addresses, which never change. */
struct sample_sums samples_read(struct samples *samples, size_t stack, uint64_t now_ns,
                                const uintptr_t **addresses, size_t *depth);

/* Returns the bytes of memory that the table takes. */
size_t samples_bytes(struct samples *samples);

#endif
