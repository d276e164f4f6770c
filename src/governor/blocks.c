#include "governor/blocks.h"

#include "governor/check.h"
#include "governor/fault_cost.h"
#include "governor/limit.h"
#include "os/clock.h"
#include "os/cpus.h"
#include "os/rseq.h"
#include "os/vm.h"

/* Grown depots hold no more than this part of all pages. */
#define DEPOT_GROWN_DIVISOR 4

/* The number of a depot of the thread's node: the near one, or others after it. */
static unsigned depot_near(const struct governor *governor, unsigned further) {
    /* Not where there is but one: the thread that is asked may have no thread-local storage to tell by. */
    if (governor->depot_count <= 1) {
        return 0;
    }
    unsigned each = governor->depots_per_node;
    unsigned own = cpu_cache_number(governor->caches) / DEPOT_CPUS + further;
    return (cpu_cache_node(governor->caches) * each + own % each) % governor->depot_count;
}

static size_t take_from_depots(struct governor *governor, uint32_t class, void **blocks, size_t count) {
    size_t taken = 0;
    for (unsigned i = 0; governor->depot_count > 0 && i < governor->depots_per_node && taken == 0; i++) {
        taken = depot_take(&governor->depots[depot_near(governor, i)], class, blocks, count);
    }
    return taken;
}

static bool put_into_depots(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    bool put = false;
    for (unsigned i = 0; i < governor->depots_to_fill && !put; i++) {
        put = depot_put(&governor->depots[depot_near(governor, i)], class, blocks, count);
    }
    return put;
}

/*
 * In the counter that goes with the thread: one for all would be a cache line that every CPU fetches for each
 * magazine. Several threads may share one.
 */
static void count_miss(struct governor *governor) {
    atomic_fetch_add_explicit(&governor->misses[thread_slot(MISS_COUNTERS)].count, 1, memory_order_relaxed);
}

uint64_t governor_cache_misses(const struct governor *governor) {
    uint64_t misses = 0;
    for (unsigned i = 0; i < MISS_COUNTERS; i++) {
        misses += atomic_load_explicit(&governor->misses[i].count, memory_order_relaxed);
    }
    return misses;
}

static void prefault(void *base, size_t bytes) {
    vm_populate(base, bytes);
}

/*
 * The thread of exclusive mode has slabs in huge-page regions too, once the program uses enough memory: it
 * touches their pages before clients need them, and spares clients TLB misses. Under the heap's lock.
 */
static enum run_choice choose_slab_run(const struct governor *governor) {
    size_t region = heap_region_pages(&governor->heap);
    bool dense = region != 0 && governor->settings.huge_pages != 0 &&
                 uses_enough_for_huge_pages(governor, 0) && !thp_policy_is_costly(&governor->thp) &&
                 heap_dirty_pages(&governor->heap) + region <= max_prefaulted_pages(governor) / 2;
    return dense ? RUN_FOR_HUGE_PAGES : RUN_FOR_LARGE;
}

/* Under the heap's lock, which it releases. */
static size_t take_from_heap(struct governor *governor, uint32_t class, void **blocks, size_t count,
                             enum run_choice choice, bool prefaults) {
    struct take_options options = {.new_slabs = choice, .prefault = prefaults ? prefault : NULL};
    uint64_t made = heap_huge_pages_made(&governor->heap);
    size_t taken = heap_take_blocks(&governor->heap, class, blocks, count, &options);
    if (heap_huge_pages_made(&governor->heap) != made && taken > 0) {
        struct stopwatch watch = stopwatch_start();
        *(volatile char *)blocks[taken - 1] = 0; /* of the newest slab */
        thp_policy_note_cost(&governor->thp, stopwatch_ns(&watch),
                             (double)heap_region_pages(&governor->heap) * fault_ns(governor));
    }
    heap_unlock_and_check(governor);
    return taken;
}

size_t governor_take_blocks(struct governor *governor, uint32_t class, void **blocks, size_t count) {
    count_miss(governor);
    size_t taken = take_from_depots(governor, class, blocks, count);
    if (taken > 0) {
        return taken;
    }
    heap_lock(governor);
    return take_from_heap(governor, class, blocks, count, RUN_FOR_ANY, false);
}

size_t governor_take_blocks_exclusive(struct governor *governor, uint32_t class, void **blocks, size_t count,
                                      bool prefaults) {
    count_miss(governor);
    size_t taken = take_from_depots(governor, class, blocks, count);
    if (taken == count) {
        return taken;
    }
    heap_lock(governor);
    enum run_choice choice = prefaults ? choose_slab_run(governor) : RUN_FOR_LARGE;
    return taken + take_from_heap(governor, class, blocks + taken, count - taken, choice, prefaults);
}

/* What the depots may grow to. Under the heap's lock. */
static size_t depot_wanted(const struct governor *governor) {
    size_t pages = heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
    return pages * page_bytes(governor) / DEPOT_GROWN_DIVISOR / governor->depot_count;
}

void governor_put_blocks(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    count_miss(governor);
    if (put_into_depots(governor, class, blocks, count)) {
        return;
    }
    struct heap_puts puts;
    heap_plan_puts(&governor->heap, &puts, blocks, count);
    heap_lock(governor);
    heap_put_planned(&governor->heap, &puts, blocks, count);
    if (governor->depot_count > 0) {
        depot_grow(&governor->depots[depot_near(governor, 0)], class, depot_wanted(governor));
    }
    heap_unlock_and_check(governor);
}
