/*
 * The depot: magazines of free blocks between the CPUs' caches and the heap (Bonwick & Adams, 2001), so that
 * what one CPU frees another allocates without the heap's lock. One for each NUMA node.
 *
 * A class's shelf is a stack of pointers under its own lock; a magazine is as many as move at once. What the
 * depot holds is bounded for all classes together. Blocks in it are not free to the heap.
 */
#ifndef CALM_CACHE_DEPOT_H
#define CALM_CACHE_DEPOT_H

#include "heap/size_class.h"
#include "os/lock.h"

#include <stdatomic.h>
#include <stdbool.h>

#define DEPOT_SHELF_BLOCKS 4096

struct depot_shelf {
    _Alignas(64) struct lock lock;
    _Atomic(uint32_t) count;
    uint32_t lowest; /* since the last depot_shed */
    _Atomic(size_t)
        credit;    /* charged, but not used: what comes and goes at one shelf need not tell the others */
    void **blocks; /* room for DEPOT_SHELF_BLOCKS, apart: pages that are written before they are read */
};

struct depot {
    const struct size_classes *classes;
    size_t charge_most;
    _Atomic(size_t) charge;      /* of what it holds, and the shelves' credits: see depot_charge */
    struct depot_shelf *shelves; /* by class */
};

/*
 * What blocks count for: their bytes, but a small block as DEPOT_CHARGE_LEAST, since it may keep a page alive
 * that nothing else lies on.
 */
#define DEPOT_CHARGE_LEAST 512
size_t depot_charge(const struct depot *depot, uint32_t class, size_t count);

/* Blocks in it, and their bytes, about: it stops nobody. */
size_t depot_blocks(const struct depot *depot, size_t *bytes);

/* charge_most: of all classes together. False if memory is short: then it is a depot that takes
 * nothing. */
bool depot_init(struct depot *depot, const struct size_classes *classes, size_t charge_most);

/* Up to count blocks of a class. */
size_t depot_take(struct depot *depot, uint32_t class, void **blocks, size_t count);

/* Takes all of them, or none where there is no room. */
bool depot_put(struct depot *depot, uint32_t class, void *const *blocks, size_t count);

/* Hands to put what nobody wanted since the last call; everything, with all. Returns the number of blocks. */
size_t depot_shed(struct depot *depot, bool all,
                  void (*put)(void *context, void *const *blocks, size_t count), void *context);

/* Around fork. */
void depot_lock_all(struct depot *depot);
void depot_unlock_all(struct depot *depot);

#endif
