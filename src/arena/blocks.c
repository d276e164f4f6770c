#include "arena/blocks.h"

#include "arena/check.h"
#include "arena/limit.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/cpus.h"
#include "os/rseq.h"

/* Returns the number of a depot of the thread's node: the nearest one if
 * `further` is 0, else one of those after it. */
static unsigned depot_near(const struct arena *arena, unsigned further) {
    /* A single depot needs no CPU number. The calling thread may have no
     * thread-local storage from which to read it. */
    if (arena->depot_count <= 1) {
        return 0;
    }
    unsigned each = arena->depots_per_node;
    calm_assert(each > 0 && arena->depot_count <= MAX_DEPOTS, each, arena->depot_count);
    unsigned own = cpu_cache_number(arena->caches) / DEPOT_CPUS + further;
    return (cpu_cache_node(arena->caches) * each + own % each) % arena->depot_count;
}

static size_t take_from_depots(struct arena *arena, uint32_t size_class, void **blocks, size_t count) {
    size_t taken = 0;
    for (unsigned i = 0; i < arena->depots_per_node && taken == 0; i++) {
        taken = depot_take(&arena->depots[depot_near(arena, i)], size_class, blocks, count);
    }
    return taken;
}

static bool put_into_depots(struct arena *arena, uint32_t size_class, void *const *blocks, size_t count) {
    return arena->depots_per_node > 0 &&
           depot_put(&arena->depots[depot_near(arena, 0)], size_class, blocks, count);
}

/* Counts in one of several counters, chosen by the thread. All CPUs would fetch
 * the cache line of a single counter for each magazine. Several threads may
 * share a counter. */
static void count_miss(struct arena *arena) {
    atomic_fetch_add_explicit(&arena->misses[thread_slot(MISS_COUNTERS)].count, 1, memory_order_relaxed);
}

uint64_t arena_cache_misses(const struct arena *arena) {
    uint64_t misses = 0;
    for (unsigned i = 0; i < MISS_COUNTERS; i++) {
        misses += atomic_load_explicit(&arena->misses[i].count, memory_order_relaxed);
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
 * never uses. The caller holds the heap's lock.
 */
static bool prefaults_new_pages(const struct arena *arena) {
    return used_bytes(arena) >= MIN_AHEAD_USED_BYTES;
}

/* Writes to the page in which each block begins. The blocks belong to the
 * caller. */
static void prefault_pages(const struct arena *arena, void *const *blocks, size_t count) {
    uintptr_t last = 0;
    for (size_t i = 0; i < count; i++) {
        uintptr_t page = (uintptr_t)blocks[i] >> arena->heap.space.page_shift;
        if (page != last) {
            *(volatile char *)blocks[i] = 0;
            last = page;
        }
    }
}

size_t arena_take_blocks(struct arena *arena, uint32_t size_class, void **blocks, size_t count) {
    count_miss(arena);
    size_t taken = take_from_depots(arena, size_class, blocks, count);
    calm_assert(size_class > 0 && size_class < arena->heap.classes->count && taken <= count, size_class,
                taken, count);
    if (taken > 0) {
        return taken;
    }
    heap_lock(arena);
    uint64_t faulted = arena->heap.runs.faulted_pages;
    taken = heap_take_blocks(&arena->heap, size_class, blocks, count);
    bool prefaults = arena->heap.runs.faulted_pages != faulted && prefaults_new_pages(arena);
    heap_unlock_and_check(arena);
    if (prefaults) {
        prefault_pages(arena, blocks, taken);
    }
    return taken;
}

void arena_put_blocks(struct arena *arena, uint32_t size_class, void *const *blocks, size_t count) {
    calm_assert(size_class > 0 && size_class < arena->heap.classes->count && count > 0, size_class, count);
    count_miss(arena);
    if (put_into_depots(arena, size_class, blocks, count)) {
        return;
    }
    struct heap_puts puts;
    heap_plan_puts(&arena->heap, &puts, blocks, count);
    heap_lock(arena);
    arena->heap.freed_now = blocks[count - 1]; /* a thread that frees a block puts it last */
    heap_put_planned(&arena->heap, &puts, blocks, count);
    arena->heap.freed_now = NULL;
    if (arena->depot_count > 0) {
        depot_grow(&arena->depots[depot_near(arena, 0)], size_class);
    }
    heap_unlock_and_check(arena);
}
