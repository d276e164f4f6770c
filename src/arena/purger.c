#include "arena/purger.h"

#include "arena/arena_probes.h"
#include "arena/limit.h"
#include "arena/select.h"
#include "arena/verify.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/clock.h"
#include "os/purge.h"
#include "os/vm.h"

#include <string.h>

#define MIN_RETRY_NS 10000000ULL
#define MAX_RETRY_NS 60000000000ULL

bool purger_try(struct arenas *arenas) {
    return lock_try(&arenas->purger.lock);
}

void purger_enter(struct arenas *arenas) {
    lock_acquire(&arenas->purger.lock);
}

void purger_leave(struct arenas *arenas) {
    lock_release(&arenas->purger.lock);
}

/* Delays the next purge after the kernel refused a whole slice. The next purge
 * is tried after some time, or once twice as many pages are dirty. The caller
 * holds the purger's lock. */
static void back_off(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    arenas->purger.retry_after_ns =
        size_min(size_max(arenas->purger.retry_after_ns * 2, MIN_RETRY_NS), MAX_RETRY_NS);
    atomic_store_explicit(&arenas->purger.retry_ns, clock_now_ns() + arenas->purger.retry_after_ns,
                          memory_order_relaxed);
    atomic_store_explicit(&arenas->limit.retry_above_pages, dirty_pages(arenas) * 2, memory_order_relaxed);
}

static void count_calls(struct arenas *arenas, const struct purge_result *result) {
    add_count(&arenas->counts.ranges, result->ranges_done);
    add_count(&arenas->counts.vectored_calls, result->vectored_calls);
    add_count(&arenas->counts.single_calls, result->single_calls);
}

/* After the kernel has refused this many ranges of a slice, the rest of the
 * slice is not tried. */
#define MAX_REFUSALS 16

/* Purges a batch, and marks the ranges that the kernel refuses. Returns the
 * number of ranges purged. The caller holds the purger's lock. */
static size_t ask_kernel(struct arenas *arenas, struct purge_batch *batch) {
    size_t at = 0;
    size_t refusals = 0;
    calm_assert(lock_is_mine(&arenas->purger.lock) && batch->count <= PURGE_MAX_RANGES, batch->count);
    struct stopwatch watch = stopwatch_start();
    while (at < batch->count && refusals < MAX_REFUSALS) {
        struct purge_result result = purge_ranges(batch->ranges + at, batch->count - at);
        at += result.ranges_done;
        count_calls(arenas, &result);
        if (at < batch->count) {
            purge_batch_refuse(batch, at, at + 1);
            at++;
            refusals++;
        }
    }
    purge_batch_refuse(batch, at, batch->count);
    uint64_t spent = stopwatch_ns(&watch);
    arenas->epoch.purge_ns += spent;
    add_count(&arenas->counts.purge_ns, spent);
    add_count(&arenas->counts.failures, refusals);
    return at - refusals;
}

/*
 * Withdraws the request for huge pages at both ends of the purged ranges. If
 * the kernel is asked to back a range by huge pages, it refills a huge page
 * some time after a part of it was purged. The heap makes no huge-page region
 * there while a part of it is being purged. The caller holds the purger's lock.
 */
static void withdraw_huge_pages(const struct arenas *arenas, const struct purge_batch *batch) {
    size_t unit = arenas->of[0].heap.runs.region_pages * page_bytes(arenas);
    char *last = NULL;
    for (size_t i = 0; i < batch->count; i++) {
        char *base = batch->ranges[i].iov_base;
        if (!purge_batch_is_purged(batch, i) ||
            !purge_batch_span(heap_of(arenas, base), &batch->ranges[i])->huge) {
            continue;
        }
        char *ends[] = {base, base + batch->ranges[i].iov_len};
        for (size_t end = 0; end < 2; end++) {
            size_t within = (uintptr_t)ends[end] & (unit - 1);
            if (within != 0 && ends[end] - within != last) {
                last = ends[end] - within;
                vm_disable_huge_pages(last, unit);
            }
        }
    }
}

/* Adds dirty pages of an arena to the batch, and stores the age of its coldest
 * run that is left, or -1. Returns the number of pages added. */
static size_t take_dirty(struct arenas *arenas, struct arena *arena, size_t pages, enum purge_depth depth,
                         uint16_t min_age, int *age) {
    heap_lock(arena);
    size_t taken = heap_add_dirty(&arena->heap, &arenas->work->batch, pages, depth, min_age);
    *age = heap_coldest_age(&arena->heap);
    report_levels(arenas, arena);
    heap_unlock(arena);
    arenas->purger.in_batch[arena - arenas->of] |= taken > 0;
    return taken;
}

/* Stores the age of each arena's coldest dirty run, or -1. Skips the arenas that
 * had no dirty page when a thread last left them. */
static void read_ages(const struct arenas *arenas, int *ages, unsigned end) {
    for (unsigned i = 0; i < end; i++) {
        struct arena *arena = (struct arena *)&arenas->of[i];
        ages[i] = -1;
        if (arena_is_ready(arenas, i) && arena_levels(arena).dirty > 0) {
            heap_lock(arena);
            ages[i] = heap_coldest_age(&arena->heap);
            heap_unlock(arena);
        }
    }
}

/* Takes the coldest runs of all arenas: those of the arena with the coldest one,
 * down to the age of the coldest run of the others, and so on. */
static void take_runs_of_all(struct arenas *arenas, size_t pages) {
    const struct purge_batch *batch = &arenas->work->batch;
    int ages[MAX_ARENAS] = {-1};
    unsigned end = atomic_load_explicit(&arenas->started, memory_order_acquire);
    read_ages(arenas, ages, end);
    while (batch->pages < pages && batch->count < PURGE_MAX_RANGES) {
        unsigned coldest = 0;
        int second = 0;
        for (unsigned i = 1; i < end; i++) {
            bool colder = ages[i] > ages[coldest];
            int other = colder ? ages[coldest] : ages[i];
            second = other > second ? other : second;
            coldest = colder ? i : coldest;
        }
        if (ages[coldest] < 0) {
            return;
        }
        size_t taken =
            take_dirty(arenas, &arenas->of[coldest], pages, PURGE_RUNS, (uint16_t)second, &ages[coldest]);
        ages[coldest] = taken == 0 ? -1 : ages[coldest];
    }
}

/* Fills the purger's batch with up to this number of pages: the coldest runs of
 * all arenas, then, by `depth`, what costs more to purge. */
static void take_slice(struct arenas *arenas, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &arenas->work->batch;
    int age;
    purge_batch_clear(batch);
    memset(arenas->purger.in_batch, 0, sizeof arenas->purger.in_batch);
    if (arena_is_alone(arenas)) {
        take_dirty(arenas, &arenas->of[0], pages, PURGE_RUNS, 0, &age);
    } else {
        take_runs_of_all(arenas, pages);
    }
    for (enum purge_depth next = PURGE_SLABS; next <= depth; next++) {
        unsigned number = 0;
        for (struct arena *arena; batch->pages < pages && (arena = arena_next(arenas, &number)) != NULL;) {
            if (arena_levels(arena).dirty > 0) {
                take_dirty(arenas, arena, pages, next, 0, &age);
            }
        }
    }
    atomic_store_explicit(&arenas->limit.purging_pages, batch->pages, memory_order_relaxed);
}

/* Puts the batch back into the heaps that it is of. Under a limit on address
 * space, they release the addresses of clean runs. */
static void put_slice_back(struct arenas *arenas) {
    for (unsigned i = 0; i < MAX_ARENAS; i++) {
        struct arena *arena = &arenas->of[i];
        if (arenas->purger.in_batch[i]) {
            heap_lock(arena);
            heap_put_back(&arena->heap, &arenas->work->batch);
            runs_release(&arena->heap.runs, false);
            report_levels(arenas, arena);
            heap_unlock(arena);
        }
    }
    atomic_store_explicit(&arenas->limit.purging_pages, 0, memory_order_relaxed);
}

/* Returns the number of pages purged: 0 if no page is dirty, or the kernel
 * refused every range. The caller holds the purger's lock. */
static size_t purge_slice(struct arenas *arenas, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &arenas->work->batch;
    calm_assert(lock_is_mine(&arenas->purger.lock) && pages > 0, pages);
    take_slice(arenas, pages, depth);
    if (batch->count == 0) {
        return 0;
    }
    size_t done = ask_kernel(arenas, batch);
    withdraw_huge_pages(arenas, batch);
    size_t purged = 0;
    for (size_t i = 0; i < batch->count; i++) {
        purged += purge_batch_is_purged(batch, i) ? batch->ranges[i].iov_len >> page_shift(arenas) : 0;
    }
    calm_assert(purged <= batch->pages, purged, batch->pages);
    arenas->epoch.purged_pages += purged;
    put_slice_back(arenas);
    add_count(&arenas->counts.purged_pages, purged);
    publish_limit(arenas);
    if (done == 0) {
        back_off(arenas);
    } else if (done == batch->count) { /* a back-off continues while the kernel refuses some ranges */
        atomic_store_explicit(&arenas->limit.retry_above_pages, 0, memory_order_relaxed);
        arenas->purger.retry_after_ns = 0;
    }
    return purged;
}

/* Purges metadata that describes no span any more, of the arenas that the last
 * slice was of. The caller holds the purger's lock, and the purger's batch is
 * not in use. */
static void purge_metadata(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    struct iovec *ranges = arenas->work->batch.ranges;
    for (unsigned i = 0; i < MAX_ARENAS; i++) {
        if (!arenas->purger.in_batch[i]) {
            continue;
        }
        struct arena *arena = &arenas->of[i];
        heap_lock(arena);
        size_t count = span_table_take_idle(&arena->heap.space.spans, ranges, PURGE_MAX_RANGES);
        heap_unlock(arena);
        if (count > 0) {
            struct purge_result result = purge_ranges(ranges, count);
            count_calls(arenas, &result);
            heap_lock(arena);
            span_table_put_idle(&arena->heap.space.spans, ranges, count);
            heap_unlock(arena);
        }
    }
}

/* Returns by how much the dirty pages exceed a number of pages. */
static size_t excess_over(struct arenas *arenas, size_t pages) {
    return size_minus(report_all(arenas).dirty, pages);
}

/* Purges at most `budget` pages, in slices, while more than `keep` are free.
 * Returns the number of pages purged. */
static size_t purge_slices(struct arenas *arenas, size_t budget, size_t keep, size_t tolerated) {
    size_t purged = 0;
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    for (size_t excess = budget; budget > 0; budget = size_min(budget, excess)) {
        size_t slice = purge_slice(arenas, budget, depth);
        budget = size_minus(budget, slice);
        purged += slice;
        if (arenas->work->batch.count == 0 && depth < PURGE_SPLIT && keep + excess > tolerated) {
            depth++;
        } else if (slice == 0) {
            break;
        }
        excess = excess_over(arenas, keep);
    }
    return purged;
}

void release_clean(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        heap_lock(arena);
        runs_release(&arena->heap.runs, false);
        runs_retract(&arena->heap.runs);
        heap_unlock(arena);
    }
}

size_t purge_down(struct arenas *arenas, size_t keep, size_t tolerated, enum reason reason) {
    calm_assert(lock_is_mine(&arenas->purger.lock) && reason < REASONS, reason);
    /* The budget is the number of dirty pages now, since other threads may free
     * pages as fast as this thread purges them. */
    size_t budget = excess_over(arenas, keep);
    if (budget == 0) {
        return 0;
    }
    uint64_t ranges = arenas->counts.ranges;
    uint64_t ns = arenas->counts.purge_ns;
    if (probe_purge_begin_is_enabled()) {
        probe_purge_begin(reason, budget * page_bytes(arenas));
    }
    size_t purged = purge_slices(arenas, budget, keep, tolerated);
    if (purged > 0) {
        purge_metadata(arenas);
        add_count(&arenas->counts.purges[reason], 1);
    }
    if (probe_purge_end_is_enabled()) {
        probe_purge_end(reason, purged * page_bytes(arenas), arenas->counts.ranges - ranges,
                        arenas->counts.purge_ns - ns);
    }
    verify_purged(arenas);
    return purged;
}

void purge_to_limit(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    for (bool purged = true; purged;) {
        struct levels totals = report_all(arenas);
        struct limit limit = limit_for(arenas, totals);
        bool over = is_over(arenas, totals.dirty, limit.max);
        purged = over && purge_down(arenas, limit.keep, limit.max, REASON_LIMIT) > 0;
    }
}
