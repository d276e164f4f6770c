/*
 * The depot: magazines of free blocks between the CPU caches and the heap (Bonwick & Adams, 2001), so that
 * what one CPU frees another allocates without the heap's lock. There is one for a few CPUs of a NUMA node,
 * whose other CPUs take from it when their own is empty.
 *
 * Each class has a bin, a stack of pointers under its own lock; a magazine is as many as move at once. The
 * depot is bounded: by the charge of all small blocks together, and of all medium ones. Blocks in it are in
 * use to the heap.
 *
 * The bound for medium blocks grows while a bin is full and empty in turn (growth.h), as where several
 * threads in turn free everything they had, and falls by the blocks that were not needed for a while. The
 * bound for small blocks is constant: those from the heap are adjacent, which is worth the longer way.
 */
#ifndef CALM_CACHE_DEPOT_H
#define CALM_CACHE_DEPOT_H

#include "cache/growth.h"
#include "heap/size_class.h"
#include "os/lock.h"

#include <stdatomic.h>
#include <stdbool.h>

/* The most that a bin holds, where address space is not limited. */
#define DEPOT_BIN_BLOCKS 4096

struct depot_bin {
    _Alignas(64) struct lock lock;
    _Atomic(size_t) count;
    size_t min_count; /* since the last depot_flush */
    struct turns turns;
    _Atomic(size_t)
        credit; /* charged, but not used: saves a magazine that comes and goes the shared counter */
};

struct depot_budget {
    size_t min_bound, max_bound;
    _Atomic(size_t) bound;
    _Atomic(size_t) charge; /* of the blocks held, and the bins' credits: see depot_charge */
};

/* All zero is a depot that takes nothing. */
struct depot {
    bool exclusive; /* used by one thread, which needs no locks */
    const struct size_classes *classes;
    struct depot_budget small, medium;
    struct depot_bin *bins; /* by class */
    size_t bin_blocks;
    void **blocks; /* bin_blocks of each class, apart: pages that are written before they are read */
};

/* What blocks count for: their bytes, but a small block for MIN_DEPOT_CHARGE, since it may keep a page that
 * holds nothing else. */
#define MIN_DEPOT_CHARGE 512
size_t depot_charge(const struct depot *depot, uint32_t class, size_t count);

/* bin_blocks: what a bin has room for. The bounds: for small blocks; for medium ones at first, and at most.
 * False, and the depot takes nothing, if memory is short. */
bool depot_init(struct depot *depot, const struct size_classes *classes, size_t bin_blocks, size_t small,
                size_t medium, size_t max_medium);

/* The blocks in it, and their bytes, approximately: no thread is stopped. */
size_t depot_blocks(const struct depot *depot, size_t *bytes);

/* The most blocks that it may hold, and their bytes. */
size_t depot_max_blocks(const struct depot *depot, size_t *bytes);

/* Up to count blocks of a class. */
size_t depot_take(struct depot *depot, uint32_t class, void **blocks, size_t count);

/* Takes all of them, or none if they exceed a bound. */
bool depot_put(struct depot *depot, uint32_t class, void *const *blocks, size_t count);

/* After a refusal: raises the class's bound by a step, if its bin should grow. */
void depot_grow(struct depot *depot, uint32_t class);

/* Passes the blocks to put that were not needed since the last call, or all of them. */
void depot_flush(struct depot *depot, bool all, put_flushed *put, void *context);

/* Around fork: holds all locks, except those that the fork may not wait for. A bin whose lock another thread
 * held is empty in the child. */
void depot_before_fork(struct depot *depot, bool waits);
void depot_after_fork(struct depot *depot, bool child);

/* Whether the caller holds a bin's lock. */
bool depot_is_held(const struct depot *depot);

#endif
