/*
 * The depot: magazines of free blocks between the CPU caches and the heap
 * (Bonwick & Adams, 2001). Through it, one CPU allocates the blocks that
 * another CPU freed, without the heap's lock. A few CPUs of a NUMA node share a
 * depot. The other CPUs of the node take blocks from it if their own depot is
 * empty.
 *
 * Each size class has a bin, which is a stack of pointers under its own lock. A
 * magazine is a number of blocks that move together. One bound limits the
 * charge of all small blocks in the depot, and another bound that of all medium
 * blocks. The heap counts blocks in a depot as in use.
 *
 * The bound for medium blocks grows while a bin is alternately full and empty
 * (growth.h), for example if several threads in turn free all their blocks. The
 * bound falls by the charge of the blocks that were not needed for a while. The
 * bound for small blocks is constant, since small blocks from the heap are
 * adjacent, which is worth the longer way.
 */
#ifndef CALM_CACHE_DEPOT_H
#define CALM_CACHE_DEPOT_H

#include "base/size_class.h"
#include "cache/growth.h"
#include "os/lock.h"

#include <stdatomic.h>
#include <stdbool.h>

/* The capacity of a bin if address space is not limited. */
#define DEPOT_BIN_BLOCKS 4096

struct depot_bin {
    _Alignas(64) struct lock lock;
    _Atomic(size_t) count;
    size_t min_count; /* since the last depot_flush */
    struct turns turns;
    /* The part of the charge that no block in the bin uses. With it, a magazine
     * that comes and goes does not change the shared counter. */
    _Atomic(size_t) credit;
};

struct depot_budget {
    size_t min_bound, max_bound;
    _Atomic(size_t) bound;
    _Atomic(size_t) charge; /* of the blocks held (depot_charge), and the bins' credits */
};

/* A depot of zeros takes no blocks. */
struct depot {
    const struct size_classes *classes;
    struct depot_budget small, medium;
    struct depot_bin *bins; /* by class */
    size_t bin_blocks;
    /* Room for bin_blocks pointers of each class. It is outside of the bins, so
     * that its pages are written before they are read. */
    void **blocks;
};

/* The charge of blocks is their size in bytes, but at least MIN_DEPOT_CHARGE
 * for each, since a small block may be the only one on a page. */
#define MIN_DEPOT_CHARGE 512
size_t depot_charge(const struct depot *depot, uint32_t size_class, size_t count);

/* `bin_blocks` is the capacity of a bin. `small` is the bound for small blocks;
 * `medium` and `max_medium` are the first and the highest bound for medium
 * blocks. If memory is short, returns false, and the depot takes no blocks. */
bool depot_init(struct depot *depot, const struct size_classes *classes, size_t bin_blocks, size_t small,
                size_t medium, size_t max_medium);

/* Returns the number of blocks in the depot, and stores their bytes. Both are
 * approximate, since other threads change the depot meanwhile. */
size_t depot_blocks(const struct depot *depot, size_t *bytes);

/* Returns the maximum of blocks that the depot may hold, and stores the maximum
 * of their bytes. */
size_t depot_max_blocks(const struct depot *depot, size_t *bytes);

/* Takes up to `count` blocks of a class out. Returns the number of blocks
 * taken. */
size_t depot_take(struct depot *depot, uint32_t size_class, void **blocks, size_t count);

/* Puts the blocks in. If they exceed a bound, puts none of them in, and returns
 * false. */
bool depot_put(struct depot *depot, uint32_t size_class, void *const *blocks, size_t count);

/* Called after depot_put refused blocks. Raises the bound by a step if the bin
 * of the class is due to grow. */
void depot_grow(struct depot *depot, uint32_t size_class);

/* Passes the blocks that were not needed since the last call to `put`, or all
 * blocks if `all` is set. */
void depot_flush(struct depot *depot, bool all, put_flushed *put, void *context);

/* The forking thread calls these around fork. They hold all locks, except those
 * that the fork may not wait for. If another thread held the lock of a bin, the
 * bin is empty in the child. */
void depot_before_fork(struct depot *depot, bool waits);
void depot_after_fork(struct depot *depot, bool child);

/* Returns whether the caller holds a bin's lock. */
bool depot_is_held(const struct depot *depot);

#endif
