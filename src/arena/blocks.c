#include "arena/blocks.h"

#include "arena/check.h"
#include "arena/limit.h"
#include "arena/select.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/cpus.h"
#include "os/rseq.h"

#include <string.h>

/* Returns the number of a depot of a node: the one for the thread's CPU if
 * `further` is 0, else one of those after it. */
static unsigned depot_of(const struct arenas *arenas, unsigned node, unsigned further) {
    unsigned each = arenas->depots_per_node;
    calm_assert(each > 0 && arenas->depot_count <= MAX_DEPOTS, each, arenas->depot_count);
    unsigned own = cpu_cache_place(arenas->caches) / DEPOT_CPUS + further;
    return (node * each + own % each) % arenas->depot_count;
}

/* Returns the number of a depot of the thread's node. */
static unsigned depot_near(const struct arenas *arenas, unsigned further) {
    /* A single depot needs no CPU number. The calling thread may have no
     * thread-local storage from which to read it. */
    return arenas->depot_count <= 1 ? 0 : depot_of(arenas, cpu_cache_node(arenas->caches), further);
}

static size_t take_from_depots(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    size_t taken = 0;
    for (unsigned i = 0; i < arenas->depots_per_node && taken == 0; i++) {
        taken = depot_take(&arenas->depots[depot_near(arenas, i)], size_class, blocks, count);
    }
    return taken;
}

/* Counts in one of several counters. All CPUs would fetch the cache line of a
 * single counter for each magazine. Several threads may share a counter. */
static void count_miss(struct arenas *arenas) {
    atomic_fetch_add_explicit(&arenas->misses[arena_slot(arenas, MISS_COUNTERS)].count, 1,
                              memory_order_relaxed);
}

uint64_t arena_cache_misses(const struct arenas *arenas) {
    uint64_t misses = 0;
    for (unsigned i = 0; i < MISS_COUNTERS; i++) {
        misses += atomic_load_explicit(&arenas->misses[i].count, memory_order_relaxed);
    }
    return misses;
}

/*
 * Returns whether the pages of new blocks are to be prefaulted.
 *
 * Many programs read a new block before they write to it, to change a part of a
 * word. The kernel maps its zero page at the read, and replaces it at the
 * write. This takes two faults, and a shootdown if other threads run. Small
 * programs are left out, since their magazines have pages that the program
 * never uses.
 */
static bool prefaults_new_pages(const struct arenas *arenas) {
    return used_bytes(arenas) >= MIN_AHEAD_USED_BYTES;
}

/* Writes to the page in which each block begins. The blocks belong to the
 * caller. If they are smaller than a page, the next block may begin in the page
 * in which the last one ends, and no other page of it may be new. */
static void prefault_pages(const struct arenas *arenas, void *const *blocks, size_t count, size_t bytes) {
    uintptr_t last = 0;
    for (size_t i = 0; i < count; i++) {
        uintptr_t page = (uintptr_t)blocks[i] >> page_shift(arenas);
        if (page != last) {
            *(volatile char *)blocks[i] = 0;
            last = page;
        }
    }
    if (bytes < page_bytes(arenas)) {
        ((volatile char *)blocks[count - 1])[bytes - 1] = 0;
    }
}

/* Takes blocks from an arena's heap. The caller holds the heap's lock, which the
 * function releases. */
static size_t take_and_unlock(struct arenas *arenas, struct arena *arena, uint32_t size_class, void **blocks,
                              size_t count) {
    uint64_t faulted = arena->heap.runs.faulted_pages;
    size_t taken = heap_take_blocks(&arena->heap, size_class, blocks, count);
    bool prefaults = arena->heap.runs.faulted_pages != faulted && prefaults_new_pages(arenas);
    heap_unlock_and_check(arenas, arena);
    if (prefaults && taken > 0) {
        prefault_pages(arenas, blocks, taken, arena->heap.classes->of[size_class].size);
    }
    return taken;
}

/* Takes blocks from another arena that has some, so that this one need not grow.
 * Returns 0 if it has none. */
static size_t take_from_other(struct arenas *arenas, struct arena *other, uint32_t size_class, void **blocks,
                              size_t count) {
    heap_lock(other);
    if (heap_has_blocks(&other->heap, size_class)) {
        return take_and_unlock(arenas, other, size_class, blocks, count);
    }
    heap_unlock(other);
    return 0;
}

static size_t take_from_heaps(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    struct arena *arena = arena_own(arenas);
    heap_lock(arena);
    if (!heap_has_blocks(&arena->heap, size_class) &&
        takes_from_others(arenas, arena, arena->heap.classes->of[size_class].slab_pages)) {
        size_t pages = arena->heap.classes->of[size_class].slab_pages;
        struct arena *other = arena_with(arenas, arena, pages, size_class);
        if (other != NULL) {
            heap_unlock(arena);
            size_t taken = take_from_other(arenas, other, size_class, blocks, count);
            if (taken > 0) {
                return taken;
            }
            heap_lock(arena);
        }
    }
    size_t taken = take_and_unlock(arenas, arena, size_class, blocks, count);
    unsigned number = 0;
    for (struct arena *other; taken == 0 && (other = arena_instead(arenas, arena, &number)) != NULL;) {
        heap_lock(other);
        taken = take_and_unlock(arenas, other, size_class, blocks, count);
    }
    return taken;
}

size_t arena_take_blocks(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    count_miss(arenas);
    size_t taken = take_from_depots(arenas, size_class, blocks, count);
    calm_assert(size_class > 0 && taken <= count, size_class, taken, count);
    return taken > 0 ? taken : take_from_heaps(arenas, size_class, blocks, count);
}

static void put_into_heap(struct arenas *arenas, struct arena *arena, void *const *blocks, size_t count,
                          const void *freed_now) {
    struct heap_puts puts;
    heap_plan_puts(&arena->heap, &puts, blocks, count);
    heap_lock(arena);
    arena->heap.freed_now = freed_now;
    heap_put_planned(&arena->heap, &puts, blocks, count);
    arena->heap.freed_now = NULL;
    heap_unlock_and_check(arenas, arena);
}

/* Puts each block into the heap that contains it, under one lock at a time. */
static void put_into_heaps(struct arenas *arenas, void *const *blocks, size_t count) {
    const void *freed_now = blocks[count - 1]; /* a thread that frees a block puts it last */
    if (arena_is_alone(arenas)) {
        put_into_heap(arenas, &arenas->of[0], blocks, count, freed_now);
        return;
    }
    void *sorted[MAX_MAGAZINE_BLOCKS];
    calm_assert(count <= MAX_MAGAZINE_BLOCKS, count);
    memcpy(sorted, blocks, count * sizeof *blocks);
    while (count > 0) {
        size_t gathered = arena_gather(arenas, sorted, count);
        count -= gathered;
        struct arena *arena = arena_of(arenas, sorted[count]);
        put_into_heap(arenas, arena, sorted + count, gathered, freed_now);
    }
}

/* Puts the blocks that belong to other NUMA nodes into the depots or the heaps
 * of these nodes. Moves the other blocks to the end, and returns their
 * number. */
static size_t send_home(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count) {
    unsigned own = cpu_cache_node(arenas->caches) % arenas->nodes;
    size_t kept = 0;
    for (size_t left = count; left > 0;) {
        size_t gathered = arena_gather(arenas, blocks, left);
        left -= gathered;
        unsigned node = arena_node(arenas, arena_of(arenas, blocks[left]));
        if (node == own) {
            memmove(blocks + count - kept - gathered, blocks + left, gathered * sizeof *blocks);
            kept += gathered;
        } else {
            struct depot *depot = &arenas->depots[depot_of(arenas, node, 0)];
            if (!depot_put(depot, size_class, blocks + left, gathered)) {
                put_into_heaps(arenas, blocks + left, gathered);
            }
        }
    }
    return kept;
}

/* Returns whether each node has arenas of its own. */
static bool has_node_arenas(const struct arenas *arenas) {
    return arenas->nodes > 1 && atomic_load_explicit(&arenas->active, memory_order_relaxed) >= arenas->nodes;
}

void arena_put_blocks(struct arenas *arenas, uint32_t size_class, void *const *blocks, size_t count) {
    calm_assert(size_class > 0 && count > 0, size_class, count);
    count_miss(arenas);
    if (arenas->depots_per_node == 0) {
        put_into_heaps(arenas, blocks, count);
        return;
    }
    void *sorted[MAX_MAGAZINE_BLOCKS];
    if (has_node_arenas(arenas)) {
        memcpy(sorted, blocks, count * sizeof *blocks);
        size_t kept = send_home(arenas, size_class, sorted, count);
        blocks = sorted + count - kept;
        count = kept;
    }
    struct depot *depot = &arenas->depots[depot_near(arenas, 0)];
    if (count > 0 && !depot_put(depot, size_class, blocks, count)) {
        put_into_heaps(arenas, blocks, count);
        depot_grow(depot, size_class);
    }
}
