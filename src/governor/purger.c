#include "governor/purger.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/limit.h"
#include "governor/probes.h"
#include "governor/verify.h"
#include "os/clock.h"
#include "os/purge.h"
#include "os/vm.h"

#define MIN_RETRY_NS 10000000ULL
#define MAX_RETRY_NS 60000000000ULL

bool purger_may_wait(const struct governor *governor) {
    return !governor->exclusive && !governor->purger_may_stop;
}

bool purger_try(struct governor *governor) {
    return lock_try(&governor->purge_lock);
}

bool purger_enter(struct governor *governor) {
    if (!purger_may_wait(governor)) {
        return purger_try(governor);
    }
    lock_acquire(&governor->purge_lock);
    return true;
}

void purger_leave(struct governor *governor) {
    lock_release(&governor->purge_lock);
}

/* After the kernel refused a whole slice: the next purge is tried later, or once much more is free. Under the
 * heap's lock. */
static void back_off(struct governor *governor) {
    calm_assert(governor->exclusive || lock_is_mine(&governor->lock));
    governor->retry_after_ns = size_min(size_max(governor->retry_after_ns * 2, MIN_RETRY_NS), MAX_RETRY_NS);
    governor->retry_ns = clock_now_ns() + governor->retry_after_ns;
    governor->retry_above_pages = heap_dirty_pages(&governor->heap) * 2;
}

/* Of one slice: where the kernel refuses so many ranges, the rest is not tried. */
#define MAX_REFUSALS 16

/* Purges a batch. Ranges that the kernel refuses are moved to its end. Returns how many were purged. Under
 * the purger's lock. */
static size_t ask_kernel(struct governor *governor, struct purge_batch *batch) {
    size_t done = 0;
    size_t end = batch->count;
    calm_assert(lock_is_mine(&governor->purge_lock) && batch->count <= PURGE_MAX_RANGES, batch->count);
    struct purge_result all = {0};
    struct stopwatch watch = stopwatch_start();
    while (done < end && batch->count - end < MAX_REFUSALS) {
        struct purge_result result = purge_ranges(batch->ranges + done, end - done);
        done += result.ranges_done;
        all.vectored_calls += result.vectored_calls;
        all.single_calls += result.single_calls;
        if (done < end) {
            heap_lock(governor); /* under which blocks are looked up in the batch */
            struct iovec refused = batch->ranges[done];
            batch->ranges[done] = batch->ranges[--end];
            batch->ranges[end] = refused;
            governor->counts.failures++;
            heap_unlock(governor);
        }
    }
    calm_assert(done <= end && end <= batch->count, done, end, batch->count);
    uint64_t spent = stopwatch_ns(&watch);
    governor->epoch_purge_ns += spent;
    heap_lock(governor);
    governor->counts.purge_ns += spent;
    governor->counts.ranges += done;
    governor->counts.vectored_calls += all.vectored_calls;
    governor->counts.single_calls += all.single_calls;
    heap_unlock(governor);
    return done;
}

/*
 * Where huge pages are requested, the kernel refills a huge page of which a part was purged, at some later
 * time. So the request is withdrawn for the huge pages at both ends of what was purged. The heap makes no
 * huge-page region there while a part of it is on its way from dirty to clean. Under the purger's lock.
 */
static void withdraw_huge_pages(const struct governor *governor, const struct purge_batch *batch,
                                size_t done) {
    size_t unit = governor->heap.runs.region_pages * page_bytes(governor);
    char *last = NULL;
    for (size_t i = 0; i < done; i++) {
        if (!purge_batch_span(&governor->heap, &batch->ranges[i])->huge) {
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

/* Returns how many pages were purged: 0 if none are dirty, or all are refused. Under the purger's lock. */
static size_t purge_slice(struct governor *governor, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &governor->batch;
    calm_assert(lock_is_mine(&governor->purge_lock) && pages > 0, pages);
    heap_lock(governor);
    heap_take_dirty(&governor->heap, batch, pages, depth);
    heap_unlock(governor);
    if (batch->count == 0) {
        return 0;
    }
    size_t done = ask_kernel(governor, batch);
    withdraw_huge_pages(governor, batch, done);
    size_t purged = 0;
    for (size_t i = 0; i < done; i++) {
        purged += batch->ranges[i].iov_len >> governor->heap.space.page_shift;
    }
    governor->epoch_purged_pages += purged;
    heap_lock(governor);
    calm_assert(purged <= batch->pages, purged, batch->pages);
    heap_put_back(&governor->heap, batch, done);
    governor->counts.purged_pages += purged;
    publish_limit(governor);
    if (done == 0) {
        back_off(governor);
    } else if (done == batch->count) { /* a back-off goes on while some ranges are refused */
        governor->retry_above_pages = 0;
        governor->retry_after_ns = 0;
    }
    heap_unlock(governor);
    return purged;
}

/* Purges metadata that describes nothing any more. Under the purger's lock; its batch is free. */
static void purge_metadata(struct governor *governor) {
    calm_assert(lock_is_mine(&governor->purge_lock));
    struct iovec *ranges = governor->batch.ranges;
    heap_lock(governor);
    size_t count = span_table_take_idle(&governor->heap.space.spans, ranges, PURGE_MAX_RANGES);
    heap_unlock(governor);
    if (count == 0) {
        return;
    }
    struct purge_result result = purge_ranges(ranges, count);
    heap_lock(governor);
    span_table_put_idle(&governor->heap.space.spans, ranges, count);
    governor->counts.ranges += result.ranges_done;
    governor->counts.vectored_calls += result.vectored_calls;
    governor->counts.single_calls += result.single_calls;
    heap_unlock(governor);
}

/* How much more than so many pages is free. */
static size_t excess_over(struct governor *governor, size_t pages) {
    heap_lock(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    heap_unlock(governor);
    return size_minus(dirty, pages);
}

/* Purges so many pages or fewer, in slices, as long as more than keep are free. Returns how many. */
static size_t purge_slices(struct governor *governor, size_t budget, size_t keep, size_t bear) {
    size_t purged = 0;
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    for (size_t excess = budget; budget > 0; budget = size_min(budget, excess)) {
        size_t slice = purge_slice(governor, budget, depth);
        if (governor->exclusive) {
            governor->ops->between_slices(governor->ops->context);
        }
        budget = size_minus(budget, slice);
        purged += slice;
        if (governor->batch.count == 0 && depth < PURGE_SPLIT && keep + excess > bear) {
            depth++;
        } else if (slice == 0) {
            break;
        }
        excess = excess_over(governor, keep);
    }
    return purged;
}

void release_clean(struct governor *governor, bool retracts) {
    calm_assert(lock_is_mine(&governor->purge_lock));
    heap_lock(governor);
    runs_release(&governor->heap.runs, false);
    if (retracts) {
        runs_retract(&governor->heap.runs);
    }
    heap_unlock(governor);
}

size_t purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason) {
    calm_assert(lock_is_mine(&governor->purge_lock) && reason < REASONS, reason);
    /* No more than is free now: other threads may free as fast as this purges. */
    size_t budget = excess_over(governor, keep);
    if (budget == 0) {
        return 0;
    }
    uint64_t ranges = governor->counts.ranges;
    uint64_t ns = governor->counts.purge_ns;
    if (probe_purge_begin_is_enabled()) {
        probe_purge_begin(reason, budget * page_bytes(governor));
    }
    size_t purged = purge_slices(governor, budget, keep, bear);
    if (purged > 0) {
        purge_metadata(governor);
        release_clean(governor, false);
        heap_lock(governor);
        governor->counts.purges[reason]++;
        heap_unlock(governor);
    }
    if (probe_purge_end_is_enabled()) {
        probe_purge_end(reason, purged * page_bytes(governor), governor->counts.ranges - ranges,
                        governor->counts.purge_ns - ns);
    }
    governor_verify_purged(governor);
    return purged;
}

void purge_to_limit(struct governor *governor) {
    calm_assert(lock_is_mine(&governor->purge_lock));
    for (bool purged = true; purged;) {
        heap_lock(governor);
        struct limit limit = limit_now(governor);
        bool over = is_over(governor, limit.max);
        heap_unlock(governor);
        purged = over && purge_down(governor, limit.keep, limit.max, REASON_LIMIT) > 0;
    }
}
