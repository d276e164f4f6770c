/*
 * The depot: magazines of free blocks between the CPUs' caches and the heap (Bonwick & Adams, 2001), so that
 * what one CPU frees another allocates without the heap's lock. There is one for a few CPUs of a NUMA
 * node, whose other CPUs take from it when their own has none.
 *
 * A class's shelf is a stack of pointers under its own lock; a magazine is as many as move at once. What the
 * depot holds is bounded for all small classes together, and for all medium ones. Blocks in it are not free
 * to the heap.
 *
 * The bound for medium blocks grows while a shelf is full and empty in turn, as where each of a row of
 * threads frees all that it had: what is refused then is soon taken from the heap again. It falls by what
 * nobody wanted. That for small ones stays: the heap's are beside each other, and worth the way.
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
    uint32_t lowest;         /* since the last depot_shed */
    _Atomic(bool) was_full;  /* and not empty since */
    _Atomic(uint32_t) turns; /* from full to empty, since the last depot_shed or growth, about: threads that
                                count at once may lose one */
    _Atomic(size_t)
        credit; /* charged, but not used: what comes and goes at one shelf need not tell the others */
};

struct depot_budget {
    size_t least, most; /* of the bound */
    _Atomic(size_t) bound;
    _Atomic(size_t) charge; /* of what is held, and the shelves' credits: see depot_charge */
};

struct depot {
    bool owned; /* by one thread, which needs no locks */
    const struct size_classes *classes;
    struct depot_budget small, medium;
    struct depot_shelf *shelves; /* by class */
    void **blocks; /* DEPOT_SHELF_BLOCKS of each class, apart: pages that are written before they are read */
};

/*
 * What blocks count for: their bytes, but a small block as DEPOT_CHARGE_LEAST, since it may keep a page alive
 * that nothing else lies on.
 */
#define DEPOT_CHARGE_LEAST 512
size_t depot_charge(const struct depot *depot, uint32_t class, size_t count);

/* Blocks in it, and their bytes, about: it stops nobody. */
size_t depot_blocks(const struct depot *depot, size_t *bytes);

/* The bounds: for small blocks; for medium ones at first, and at most. False if memory is short: then it is a
 * depot that takes nothing. */
bool depot_init(struct depot *depot, const struct size_classes *classes, size_t small, size_t medium,
                size_t medium_most);

/* Blocks that it may hold, and their bytes. */
size_t depot_blocks_most(const struct depot *depot, size_t *bytes);

/* Up to count blocks of a class. */
size_t depot_take(struct depot *depot, uint32_t class, void **blocks, size_t count);

/* Takes all of them, or none where there is no room. */
bool depot_put(struct depot *depot, uint32_t class, void *const *blocks, size_t count);

/* After a refusal: raises the class's bound by a step, if its shelf has been full and empty in turn for some
 * time and the bound is less than wanted. */
void depot_grow(struct depot *depot, uint32_t class, size_t wanted);

/* Hands to put what nobody wanted since the last call; everything, with all. Returns the number of blocks. */
size_t depot_shed(struct depot *depot, bool all,
                  void (*put)(void *context, void *const *blocks, size_t count), void *context);

/* Around fork: holds all locks in between, unless it may not wait for one. A shelf whose lock another thread
 * held is empty in the child. */
void depot_before_fork(struct depot *depot, bool waits);
void depot_after_fork(struct depot *depot, bool child);

/* Whether the caller holds a shelf's lock. */
bool depot_is_held(const struct depot *depot);

#endif
