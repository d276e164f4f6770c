#include "governor/blocks.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/check.h"
#include "governor/fault_cost.h"
#include "governor/limit.h"
#include "os/cpus.h"
#include "os/rseq.h"
#include "os/vm.h"

/* The number of a depot of the thread's node: the near one, or others after it. */
static unsigned depot_near(const struct governor *governor, unsigned further) {
    /* Not where there is but one: the thread that is asked may have no thread-local storage to tell by. */
    if (governor->depot_count <= 1) {
        return 0;
    }
    unsigned each = governor->depots_per_node;
    calm_assert(each > 0 && governor->depot_count <= MAX_DEPOTS, each, governor->depot_count);
    unsigned own = cpu_cache_number(governor->caches) / DEPOT_CPUS + further;
    return (cpu_cache_node(governor->caches) * each + own % each) % governor->depot_count;
}

static size_t take_from_depots(struct governor *governor, uint32_t class, void **blocks, size_t count) {
    size_t taken = 0;
    for (unsigned i = 0; i < governor->depots_per_node && taken == 0; i++) {
        taken = depot_take(&governor->depots[depot_near(governor, i)], class, blocks, count);
    }
    return taken;
}

static bool put_into_depots(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    bool put = false;
    /* A thread that no other is in the way of uses all depots of its node. */
    size_t tries = governor->exclusive ? MAX_DEPOTS : 1;
    for (unsigned i = 0; i < size_min(governor->depots_per_node, tries) && !put; i++) {
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

/*
 * The thread of exclusive mode has slabs in huge-page regions too, once the program uses enough memory: it
 * touches their pages before clients need them, and spares clients TLB misses. Under the heap's lock.
 */
static enum run_choice blocks_choose_run(const struct governor *governor, bool prefaults) {
    if (!governor->exclusive) {
        return RUN_FOR_ANY;
    }
    bool dense = prefaults && allows_region(governor, 0) && !thp_policy_is_costly(&governor->thp);
    return dense ? RUN_FOR_HUGE_PAGES : RUN_FOR_LARGE;
}

/*
 * Whether the pages of new blocks are written before the program sees them: many programs first read a new
 * block, to change a part of a word. The kernel then maps its zero page, and replaces it at the write that
 * follows: two faults, and, if other threads run, a shootdown. Not in small programs, whose magazines have
 * pages that are never used. Under the heap's lock.
 */
static bool touches_new_pages(const struct governor *governor) {
    return !governor->exclusive && used_bytes(governor) >= MIN_AHEAD_USED_BYTES;
}

/* Writes to the page in which each of the caller's own blocks begins. */
static void touch_pages(const struct governor *governor, void *const *blocks, size_t count) {
    uintptr_t last = 0;
    for (size_t i = 0; i < count; i++) {
        uintptr_t page = (uintptr_t)blocks[i] >> governor->heap.space.page_shift;
        if (page != last) {
            *(volatile char *)blocks[i] = 0;
            last = page;
        }
    }
}

size_t governor_take_blocks(struct governor *governor, uint32_t class, void **blocks, size_t count,
                            bool prefaults) {
    count_miss(governor);
    size_t taken = take_from_depots(governor, class, blocks, count);
    calm_assert(class > 0 && class < governor->heap.classes->count && taken <= count, class, taken, count);
    if (taken == count || (taken > 0 && !governor->exclusive)) {
        return taken;
    }
    heap_lock(governor);
    struct take_options options = {blocks_choose_run(governor, prefaults), prefaults ? vm_populate : NULL};
    uint64_t made = governor->heap.runs.huge_pages_made;
    uint64_t faulted = governor->heap.runs.faulted_pages;
    size_t from_heap = heap_take_blocks(&governor->heap, class, blocks + taken, count - taken, &options);
    taken += from_heap;
    if (governor->heap.runs.huge_pages_made != made && from_heap > 0) {
        touch_huge_page(governor, blocks[taken - 1]); /* of the newest slab */
    }
    bool touches = governor->heap.runs.faulted_pages != faulted && touches_new_pages(governor);
    heap_unlock_and_check(governor);
    if (touches) {
        touch_pages(governor, blocks + taken - from_heap, from_heap);
    }
    return taken;
}

void governor_put_blocks(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    calm_assert(class > 0 && class < governor->heap.classes->count && count > 0, class, count);
    count_miss(governor);
    if (put_into_depots(governor, class, blocks, count)) {
        return;
    }
    struct heap_puts puts;
    heap_plan_puts(&governor->heap, &puts, blocks, count);
    heap_lock(governor);
    /* A thread that frees a block puts it last. A server's clients freed theirs before. */
    governor->heap.freed_now = governor->has_clients ? NULL : blocks[count - 1];
    heap_put_planned(&governor->heap, &puts, blocks, count);
    governor->heap.freed_now = NULL;
    if (governor->depot_count > 0) {
        depot_grow(&governor->depots[depot_near(governor, 0)], class);
    }
    heap_unlock_and_check(governor);
}
