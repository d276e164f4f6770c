#include "governor/purger.h"

#include "base/size.h"
#include "governor/limit.h"
#include "governor/probes.h"
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

/* After the kernel refused a purge: the next is tried later, or once much more is free. Under the heap's
 * lock. */
static void back_off(struct governor *governor) {
    uint64_t after = governor->retry_after_ns * 2;
    governor->retry_after_ns = after < MIN_RETRY_NS   ? MIN_RETRY_NS
                               : after > MAX_RETRY_NS ? MAX_RETRY_NS
                                                      : after;
    governor->retry_ns = clock_now_ns() + governor->retry_after_ns;
    governor->retry_above_pages = heap_dirty_pages(&governor->heap) * 2;
}

enum slice { SLICE_PURGED, SLICE_EMPTY, SLICE_REFUSED };

/* Of one slice: where the kernel refuses so many ranges, the rest is not tried. */
#define MAX_REFUSALS 16

/* Purges a batch. Ranges that the kernel refuses are moved to its end. Returns how many were purged. Under
 * the purger's lock. */
static size_t purge_batch(struct governor *governor, struct purge_batch *batch) {
    size_t done = 0;
    size_t end = batch->count;
    struct governor_counts counts = {0};
    struct stopwatch watch = stopwatch_start();
    while (done < end && batch->count - end < MAX_REFUSALS) {
        struct purge_result result = purge_ranges(batch->ranges + done, end - done);
        done += result.ranges_done;
        counts.vectored_calls += result.vectored_calls;
        counts.single_calls += result.single_calls;
        if (done < end) {
            heap_lock(governor); /* under which blocks are looked up in the batch */
            purge_batch_swap(batch, done, --end);
            heap_unlock(governor);
            counts.failures++;
        }
    }
    uint64_t spent = stopwatch_ns(&watch);
    governor->epoch_purge_ns += spent;
    heap_lock(governor);
    governor->counts.purge_ns += spent;
    governor->counts.ranges += done;
    governor->counts.vectored_calls += counts.vectored_calls;
    governor->counts.single_calls += counts.single_calls;
    governor->counts.failures += counts.failures;
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
    size_t unit = heap_region_pages(&governor->heap) * page_bytes(governor);
    char *last = NULL;
    for (size_t i = 0; i < done; i++) {
        if (!batch->spans[i]->huge) {
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

/* Under the purger's lock. */
static enum slice purge_slice(struct governor *governor, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &governor->batch;
    heap_lock(governor);
    heap_take_dirty(&governor->heap, batch, pages, depth);
    heap_unlock(governor);
    if (batch->count == 0) {
        return SLICE_EMPTY;
    }
    size_t done = purge_batch(governor, batch);
    withdraw_huge_pages(governor, batch, done);
    size_t purged = 0;
    for (size_t i = 0; i < done; i++) {
        purged += batch->ranges[i].iov_len >> governor->heap.space.page_shift;
    }
    governor->epoch_purged_pages += purged;
    heap_lock(governor);
    heap_put_back(&governor->heap, batch, done);
    governor->counts.purged_pages += purged;
    publish_limit(governor);
    if (done == 0) {
        back_off(governor);
    } else if (done == batch->count) {
        governor->retry_above_pages = 0;
        governor->retry_after_ns = 0;
    }
    heap_unlock(governor);
    return done == 0 ? SLICE_REFUSED : SLICE_PURGED;
}

/* Purges metadata that describes nothing any more. Under the purger's lock; its batch is free. */
static void purge_metadata(struct governor *governor) {
    struct iovec *ranges = governor->batch.ranges;
    heap_lock(governor);
    size_t count = span_table_take_idle(&governor->heap.space.spans, ranges, PURGE_RANGES);
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

/* One call of purge_down, for tracers. */
struct traced {
    bool begun;
    uint64_t pages, ranges, ns; /* as counted before it */
};

/* Before each slice. Under the purger's lock. */
static void trace_begin(struct traced *traced, const struct governor *governor, size_t pages,
                        enum reason reason) {
    if (traced->begun) {
        return;
    }
    *traced = (struct traced){true, governor->epoch_purged_pages, governor->counts.ranges,
                              governor->counts.purge_ns};
    if (probe_purge_begin_is_enabled()) {
        probe_purge_begin(reason, pages * page_bytes(governor));
    }
}

static void trace_end(const struct traced *traced, const struct governor *governor, enum reason reason) {
    if (traced->begun && probe_purge_end_is_enabled()) {
        probe_purge_end(reason, (governor->epoch_purged_pages - traced->pages) * page_bytes(governor),
                        governor->counts.ranges - traced->ranges, governor->counts.purge_ns - traced->ns);
    }
}

bool purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason) {
    bool purged = false;
    struct traced traced = {0};
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    /* No more than is free now: other threads may free as fast as this purges. */
    size_t budget = SIZE_MAX;
    for (;;) {
        heap_lock(governor);
        size_t dirty = heap_dirty_pages(&governor->heap);
        heap_unlock(governor);
        size_t excess = dirty > keep ? dirty - keep : 0;
        budget = size_min(budget, excess);
        if (budget == 0) {
            break;
        }
        trace_begin(&traced, governor, budget, reason);
        uint64_t before = governor->epoch_purged_pages;
        enum slice slice = purge_slice(governor, budget, depth);
        governor->ops->between_slices(governor->ops->context);
        size_t given = governor->epoch_purged_pages - before;
        budget -= size_min(given, budget);
        purged |= slice == SLICE_PURGED;
        if (slice == SLICE_EMPTY && depth < PURGE_SPLIT && dirty > bear) {
            depth++;
        } else if (slice != SLICE_PURGED) {
            break;
        }
    }
    if (purged) {
        purge_metadata(governor);
        heap_lock(governor);
        governor->counts.purges += reason == REASON_LIMIT;
        governor->counts.purges_epoch += reason == REASON_TIME;
        governor->counts.purges_request += reason == REASON_ASKED;
        heap_unlock(governor);
    }
    trace_end(&traced, governor, reason);
    return purged;
}

void purge_to_limit(struct governor *governor) {
    for (bool purged = true; purged;) {
        heap_lock(governor);
        struct limit limit = limit_now(governor);
        bool over = is_over(governor, limit.max);
        heap_unlock(governor);
        purged = over && purge_down(governor, limit.keep, limit.max, REASON_LIMIT);
    }
}
