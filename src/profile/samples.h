/*
 * What sampling has found: for each stack of calls what it allocated, what of it is still in use, what was in
 * use at the peak and how long blocks lived; and the sampled blocks that live.
 *
 * An instance without globals, in address space of its own. Stacks are never forgotten; blocks are, when they
 * are freed. Both are bounded: what does not fit is dropped, and counted.
 *
 * The peak is exact at no cost that grows with the number of stacks: a new one begins an epoch, and a stack
 * that changes for the first time in an epoch keeps its sum of before. One that has not changed since has it
 * still.
 *
 * A process outside may read all of it without a lock, as struct samples_layout describes it: a stack whose
 * sequence number is even and the same before and after was not being changed.
 *
 * Thread-safe. Signals wait while its lock is held, so that a handler that allocates cannot meet its own
 * thread's. Preserves errno; calls nothing that allocates.
 */
#ifndef CALM_PROFILE_SAMPLES_H
#define CALM_PROFILE_SAMPLES_H

#include "os/address_space.h"
#include "os/lock.h"
#include "profile/sampling.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SAMPLE_DEPTH_MOST  64
#define SAMPLE_STACKS_MOST ((size_t)1 << 16)
#define SAMPLE_BLOCKS_MOST ((size_t)1 << 17) /* each may take a page that it does not need */

/* Sums of weights; and of times, each multiplied by the block's weight. */
struct sample_sums {
    struct sample_weight allocated;
    struct sample_weight in_use;
    struct sample_weight at_peak;
    uint64_t lifetime_ns; /* of blocks that were freed: from allocation to free */
    uint64_t age_ns;      /* of those in use: from allocation until now */
};

struct sample_stack {
    _Atomic(uint32_t) sequence; /* odd while it is being changed */
    uint32_t first;             /* of its addresses */
    uint32_t depth;
    uint32_t next; /* with the same low bits of the hash; 0: none */
    uint64_t hash;
    struct sample_weight allocated;
    struct sample_weight in_use;
    struct sample_weight at_peak; /* unless the stack has not changed since the peak: then it is in_use */
    uint64_t epoch;               /* of the last change */
    double lifetimes;             /* of freed blocks: the sum of count times nanoseconds */
    double births;                /* of those in use: count times the clock's nanoseconds */
};

struct sample_block {
    uintptr_t block;
    struct sample_weight weight;
    uint64_t born_ns;
    uint32_t stack;
    uint32_t next; /* with the same low bits of the hash, or free; 0: none */
};

struct samples {
    struct lock lock;
    struct os_region stacks_region;
    struct os_region addresses_region;
    struct os_region blocks_region;
    struct os_region heads_region;
    struct sample_stack *stacks;
    uintptr_t *addresses;
    struct sample_block *blocks;
    uint32_t *stack_heads;
    uint32_t *block_heads;
    _Atomic(uint32_t) stacks_end; /* number 0 is none; those below it are whole */
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

/*
 * Where all of it is, for a process outside. Offsets are those of the fields of the same name in struct
 * samples and in struct sample_stack, whose weights are a count and bytes of 64 bits each. Stack number 0 is
 * none. New fields go to the end; a change of meaning changes the version.
 */
#define SAMPLES_MAGIC   "calmheap" /* without its NUL */
#define SAMPLES_VERSION 1

struct samples_layout {
    char magic[8];
    uint32_t version;
    uint32_t bytes;                /* of this */
    const struct samples *samples; /* all zero if the profile was never on */
    const void *mean_bytes;        /* uint64_t: between two samples now; 0: off */
    const void *last_mean_bytes;   /* uint64_t: the same when it was last on */
    uint32_t count_unit;           /* counts are in this part of a block */
    uint32_t max_depth;
    uint32_t max_stacks;
    uint32_t stacks; /* pointers */
    uint32_t addresses;
    uint32_t stacks_end; /* uint32_t */
    uint32_t addresses_end;
    uint32_t dropped; /* uint64_t */
    uint32_t peak_bytes;
    uint32_t peak_ns;
    uint32_t peak_epoch;
    uint32_t stack_bytes;
    uint32_t sequence; /* uint32_t */
    uint32_t first;
    uint32_t depth;
    uint32_t allocated; /* weights */
    uint32_t in_use;
    uint32_t at_peak;
    uint32_t epoch;     /* uint64_t */
    uint32_t lifetimes; /* double */
    uint32_t births;
    uint32_t unused;
};

/* Of these samples, and of two words. */
#define SAMPLES_LAYOUT(table, mean, last_mean)                                                              \
    {                                                                                                       \
        .magic = {'c', 'a', 'l', 'm', 'h', 'e', 'a', 'p'}, .version = SAMPLES_VERSION,                      \
        .bytes = sizeof(struct samples_layout), .samples = (table), .mean_bytes = (mean),                   \
        .last_mean_bytes = (last_mean), .count_unit = SAMPLE_COUNT_UNIT, .max_depth = SAMPLE_DEPTH_MOST,    \
        .max_stacks = SAMPLE_STACKS_MOST, .stacks = offsetof(struct samples, stacks),                       \
        .addresses = offsetof(struct samples, addresses),                                                   \
        .stacks_end = offsetof(struct samples, stacks_end),                                                 \
        .addresses_end = offsetof(struct samples, addresses_end),                                           \
        .dropped = offsetof(struct samples, dropped), .peak_bytes = offsetof(struct samples, peak_bytes),   \
        .peak_ns = offsetof(struct samples, peak_ns), .peak_epoch = offsetof(struct samples, peak_epoch),   \
        .stack_bytes = sizeof(struct sample_stack), .sequence = offsetof(struct sample_stack, sequence),    \
        .first = offsetof(struct sample_stack, first), .depth = offsetof(struct sample_stack, depth),       \
        .allocated = offsetof(struct sample_stack, allocated),                                              \
        .in_use = offsetof(struct sample_stack, in_use), .at_peak = offsetof(struct sample_stack, at_peak), \
        .epoch = offsetof(struct sample_stack, epoch),                                                      \
        .lifetimes = offsetof(struct sample_stack, lifetimes),                                              \
        .births = offsetof(struct sample_stack, births),                                                    \
    }

/* All zero before. False if there is no address space. */
bool samples_init(struct samples *samples);

/* A block was sampled, of a call with this stack, the callee first. now_ns is of a clock that never goes
 * back. False if there is no room for it. */
bool samples_add(struct samples *samples, const void *block, struct sample_weight weight,
                 const uintptr_t *addresses, size_t depth, uint64_t now_ns);

/* The block is about to be freed: if it was sampled, it no longer is in use. Whether it was. */
bool samples_remove(struct samples *samples, const void *block, uint64_t now_ns);

/* Counts a sample that could not be taken. */
void samples_drop(struct samples *samples);

/* Whether one more block would fit: near enough, before the block is there. */
static inline bool samples_have_room(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) < SAMPLE_BLOCKS_MOST - 1;
}

/* Whether any sampled block lives: one load, before a lock. */
static inline bool samples_any_live(const struct samples *samples) {
    return atomic_load_explicit(&samples->live, memory_order_relaxed) != 0;
}

/* How many stacks there are: the numbers from 1 on. Of each, its addresses, which stay, and its sums now. */
size_t samples_stack_count(struct samples *samples);
/* No fewer than the addresses of all those stacks, if asked for after them. */
size_t samples_address_count(struct samples *samples);
struct sample_sums samples_read(struct samples *samples, size_t stack, uint64_t now_ns,
                                const uintptr_t **addresses, size_t *depth);

/* Bytes of memory in use for it. */
size_t samples_bytes(struct samples *samples);

/* Around fork: the child has all of it. */
void samples_before_fork(struct samples *samples);
void samples_after_fork(struct samples *samples);

#endif
