/*
 * What sampling has found: for each stack of calls what it allocated and what of it is still in use, and the
 * sampled blocks that live.
 *
 * An instance without globals, in address space of its own. Stacks are never forgotten; blocks are, when they
 * are freed. Both are bounded: what does not fit is dropped, and counted.
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

/* Sums of weights. */
struct sample_sums {
    struct sample_weight allocated;
    struct sample_weight in_use;
};

struct sample_stack {
    uint64_t hash;
    uint32_t first; /* of its addresses */
    uint32_t depth;
    uint32_t next; /* with the same low bits of the hash; 0: none */
    struct sample_sums sums;
};

struct sample_block {
    uintptr_t block;
    struct sample_weight weight;
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
    uint32_t stacks_end; /* number 0 is none */
    uint32_t addresses_end;
    uint32_t blocks_end; /* number 0 is none */
    uint32_t blocks_free;
    _Atomic(uint32_t) live;
    _Atomic(uint64_t) dropped;
};

/* All zero before. False if there is no address space. */
bool samples_init(struct samples *samples);

/* A block was sampled, of a call with this stack, the callee first. False if there is no room for it. */
bool samples_add(struct samples *samples, const void *block, struct sample_weight weight,
                 const uintptr_t *addresses, size_t depth);

/* The block is about to be freed: if it was sampled, it no longer is in use. Whether it was. */
bool samples_remove(struct samples *samples, const void *block);

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
struct sample_sums samples_read(struct samples *samples, size_t stack, const uintptr_t **addresses,
                                size_t *depth);

/* Bytes of memory in use for it. */
size_t samples_bytes(struct samples *samples);

/* Around fork: the child has all of it. */
void samples_before_fork(struct samples *samples);
void samples_after_fork(struct samples *samples);

#endif
