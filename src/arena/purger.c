#include "arena/purger.h"

#include "arena/arena_probes.h"
#include "arena/limit.h"
#include "arena/verify.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/clock.h"
#include "os/purge.h"
#include "os/vm.h"

#define MIN_RETRY_NS 10000000ULL
#define MAX_RETRY_NS 60000000000ULL

bool purger_try(struct arena *arena) {
    return lock_try(&arena->purger.lock);
}

void purger_enter(struct arena *arena) {
    lock_acquire(&arena->purger.lock);
}

void purger_leave(struct arena *arena) {
    lock_release(&arena->purger.lock);
}

/* Delays the next purge after the kernel refused a whole slice. The next purge
 * is tried after some time, or once twice as many pages are dirty. The caller
 * holds the heap's lock. */
static void back_off(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->lock));
    arena->purger.retry_after_ns =
        size_min(size_max(arena->purger.retry_after_ns * 2, MIN_RETRY_NS), MAX_RETRY_NS);
    arena->purger.retry_ns = clock_now_ns() + arena->purger.retry_after_ns;
    arena->limit.retry_above_pages = heap_dirty_pages(&arena->heap) * 2;
}

/* After the kernel has refused this many ranges of a slice, the rest of the
 * slice is not tried. */
#define MAX_REFUSALS 16

/* Purges a batch. Moves the ranges that the kernel refuses to the end of the
 * batch. Returns the number of ranges purged. The caller holds the purger's
 * lock. */
static size_t ask_kernel(struct arena *arena, struct purge_batch *batch) {
    size_t done = 0;
    size_t end = batch->count;
    calm_assert(lock_is_mine(&arena->purger.lock) && batch->count <= PURGE_MAX_RANGES, batch->count);
    struct purge_result all = {0};
    struct stopwatch watch = stopwatch_start();
    while (done < end && batch->count - end < MAX_REFUSALS) {
        struct purge_result result = purge_ranges(batch->ranges + done, end - done);
        done += result.ranges_done;
        all.vectored_calls += result.vectored_calls;
        all.single_calls += result.single_calls;
        if (done < end) {
            heap_lock(arena); /* threads look up blocks in the batch under this lock */
            struct iovec refused = batch->ranges[done];
            batch->ranges[done] = batch->ranges[--end];
            batch->ranges[end] = refused;
            arena->counts.failures++;
            heap_unlock(arena);
        }
    }
    calm_assert(done <= end && end <= batch->count, done, end, batch->count);
    uint64_t spent = stopwatch_ns(&watch);
    arena->epoch.purge_ns += spent;
    heap_lock(arena);
    arena->counts.purge_ns += spent;
    arena->counts.ranges += done;
    arena->counts.vectored_calls += all.vectored_calls;
    arena->counts.single_calls += all.single_calls;
    heap_unlock(arena);
    return done;
}

/*
 * Withdraws the request for huge pages at both ends of the purged ranges. If
 * the kernel is asked to back a range by huge pages, it refills a huge page
 * some time after a part of it was purged. The heap makes no huge-page region
 * there while a part of it is being purged. The caller holds the purger's lock.
 */
static void withdraw_huge_pages(const struct arena *arena, const struct purge_batch *batch, size_t done) {
    size_t unit = arena->heap.runs.region_pages * page_bytes(arena);
    char *last = NULL;
    for (size_t i = 0; i < done; i++) {
        if (!purge_batch_span(&arena->heap, &batch->ranges[i])->huge) {
            continue;
        }
        char *base = batch->ranges[i].iov_base;
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

/* Returns the number of pages purged: 0 if no page is dirty, or the kernel
 * refused every range. The caller holds the purger's lock. */
static size_t purge_slice(struct arena *arena, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &arena->purger.batch;
    calm_assert(lock_is_mine(&arena->purger.lock) && pages > 0, pages);
    heap_lock(arena);
    heap_take_dirty(&arena->heap, batch, pages, depth);
    heap_unlock(arena);
    if (batch->count == 0) {
        return 0;
    }
    size_t done = ask_kernel(arena, batch);
    withdraw_huge_pages(arena, batch, done);
    size_t purged = 0;
    for (size_t i = 0; i < done; i++) {
        purged += batch->ranges[i].iov_len >> arena->heap.space.page_shift;
    }
    arena->epoch.purged_pages += purged;
    heap_lock(arena);
    calm_assert(purged <= batch->pages, purged, batch->pages);
    heap_put_back(&arena->heap, batch, done);
    arena->counts.purged_pages += purged;
    publish_limit(arena);
    if (done == 0) {
        back_off(arena);
    } else if (done == batch->count) { /* a back-off continues while the kernel refuses some ranges */
        arena->limit.retry_above_pages = 0;
        arena->purger.retry_after_ns = 0;
    }
    heap_unlock(arena);
    return purged;
}

/* Purges metadata that describes no span any more. The caller holds the
 * purger's lock, and the purger's batch is not in use. */
static void purge_metadata(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->purger.lock));
    struct iovec *ranges = arena->purger.batch.ranges;
    heap_lock(arena);
    size_t count = span_table_take_idle(&arena->heap.space.spans, ranges, PURGE_MAX_RANGES);
    heap_unlock(arena);
    if (count == 0) {
        return;
    }
    struct purge_result result = purge_ranges(ranges, count);
    heap_lock(arena);
    span_table_put_idle(&arena->heap.space.spans, ranges, count);
    arena->counts.ranges += result.ranges_done;
    arena->counts.vectored_calls += result.vectored_calls;
    arena->counts.single_calls += result.single_calls;
    heap_unlock(arena);
}

/* Returns by how much the dirty pages exceed a number of pages. */
static size_t excess_over(struct arena *arena, size_t pages) {
    heap_lock(arena);
    size_t dirty = heap_dirty_pages(&arena->heap);
    heap_unlock(arena);
    return size_minus(dirty, pages);
}

/* Purges at most `budget` pages, in slices, while more than `keep` are free.
 * Returns the number of pages purged. */
static size_t purge_slices(struct arena *arena, size_t budget, size_t keep, size_t tolerated) {
    size_t purged = 0;
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    for (size_t excess = budget; budget > 0; budget = size_min(budget, excess)) {
        size_t slice = purge_slice(arena, budget, depth);
        budget = size_minus(budget, slice);
        purged += slice;
        if (arena->purger.batch.count == 0 && depth < PURGE_SPLIT && keep + excess > tolerated) {
            depth++;
        } else if (slice == 0) {
            break;
        }
        excess = excess_over(arena, keep);
    }
    return purged;
}

void release_clean(struct arena *arena, bool retracts) {
    calm_assert(lock_is_mine(&arena->purger.lock));
    heap_lock(arena);
    runs_release(&arena->heap.runs, false);
    if (retracts) {
        runs_retract(&arena->heap.runs);
    }
    heap_unlock(arena);
}

size_t purge_down(struct arena *arena, size_t keep, size_t tolerated, enum reason reason) {
    calm_assert(lock_is_mine(&arena->purger.lock) && reason < REASONS, reason);
    /* The budget is the number of dirty pages now, since other threads may free
     * pages as fast as this thread purges them. */
    size_t budget = excess_over(arena, keep);
    if (budget == 0) {
        return 0;
    }
    uint64_t ranges = arena->counts.ranges;
    uint64_t ns = arena->counts.purge_ns;
    if (probe_purge_begin_is_enabled()) {
        probe_purge_begin(reason, budget * page_bytes(arena));
    }
    size_t purged = purge_slices(arena, budget, keep, tolerated);
    if (purged > 0) {
        purge_metadata(arena);
        release_clean(arena, false);
        heap_lock(arena);
        arena->counts.purges[reason]++;
        heap_unlock(arena);
    }
    if (probe_purge_end_is_enabled()) {
        probe_purge_end(reason, purged * page_bytes(arena), arena->counts.ranges - ranges,
                        arena->counts.purge_ns - ns);
    }
    verify_purged(arena);
    return purged;
}

void purge_to_limit(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->purger.lock));
    for (bool purged = true; purged;) {
        heap_lock(arena);
        struct limit limit = limit_now(arena);
        bool over = is_over(arena, limit.max);
        heap_unlock(arena);
        purged = over && purge_down(arena, limit.keep, limit.max, REASON_LIMIT) > 0;
    }
}
