#include "governor/purger.h"

#include "governor/bound.h"
#include "governor/heap_lock.h"
#include "governor/probes.h"
#include "os/address_space.h"
#include "os/clock.h"
#include "os/purge.h"

#define RETRY_NS_LEAST 10000000ULL
#define RETRY_NS_MOST  60000000000ULL

bool purger_try(struct governor *governor) {
    if (governor->owner == NULL) {
        return lock_try(&governor->purge_lock);
    }
    return !atomic_exchange_explicit(&governor->purging, true, memory_order_relaxed);
}

bool purger_enter(struct governor *governor) {
    if (governor->owner == NULL && !governor->purger_may_stop) {
        lock_acquire(&governor->purge_lock);
        return true;
    }
    return purger_try(governor);
}

void purger_leave(struct governor *governor) {
    if (governor->owner != NULL) {
        atomic_store_explicit(&governor->purging, false, memory_order_relaxed);
    } else {
        lock_release(&governor->purge_lock);
    }
}

/* The kernel would not: do not ask again with every free, but not never either. */
static void back_off(struct governor *governor) {
    uint64_t after = governor->retry_after_ns * 2;
    governor->retry_after_ns = after < RETRY_NS_LEAST  ? RETRY_NS_LEAST
                               : after > RETRY_NS_MOST ? RETRY_NS_MOST
                                                       : after;
    governor->retry_ns = clock_now_ns() + governor->retry_after_ns;
    governor->retry_above_pages = heap_dirty_pages(&governor->heap) * 2;
}

enum slice { SLICE_PURGED, SLICE_EMPTY, SLICE_REFUSED };

/* Of one slice; where the kernel refuses more, it may as well refuse all. */
#define REFUSALS_MOST 16

/*
 * Purges a batch; what the kernel refuses is skipped, and lies behind the rest then. Returns how many ranges
 * were purged. Under the purger's lock.
 */
static size_t purge_batch(struct governor *governor, struct purge_batch *batch) {
    size_t done = 0;
    size_t end = batch->count;
    struct governor_counts counts = {0};
    struct stopwatch watch = stopwatch_start();
    while (done < end && batch->count - end < REFUSALS_MOST) {
        struct purge_result result = purge_ranges(batch->ranges + done, end - done);
        done += result.ranges_done;
        counts.vectored_calls += result.vectored_calls;
        counts.single_calls += result.single_calls;
        if (done < end) {
            heap_enter(governor); /* whose owner may look a block up in the batch */
            purge_batch_swap(batch, done, --end);
            heap_exit(governor);
            counts.failures++;
        }
    }
    uint64_t spent = stopwatch_ns(&watch);
    governor->window_purge_ns += spent;
    heap_enter(governor);
    governor->counts.purge_ns += spent;
    governor->counts.ranges += done;
    governor->counts.vectored_calls += counts.vectored_calls;
    governor->counts.single_calls += counts.single_calls;
    governor->counts.failures += counts.failures;
    heap_exit(governor);
    return done;
}

/*
 * The kernel fills a huge page of which a part is missing, where huge pages are wanted, when it finds the
 * time: so around what was given back of one they are not wanted any more. No huge region is made there again
 * as long as a part of it is on its way from dirty to clean. Under the purger's lock.
 */
static void want_no_parts(const struct governor *governor, const struct purge_batch *batch, size_t done) {
    size_t unit = governor->heap.runs.huge_pages * page_bytes(governor);
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
                os_want_no_huge_pages(last, unit);
            }
        }
    }
}

/* Under the purger's lock. */
static enum slice purge_slice(struct governor *governor, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &governor->batch;
    heap_enter(governor);
    heap_take_dirty(&governor->heap, batch, pages, depth);
    heap_exit(governor);
    if (batch->count == 0) {
        return SLICE_EMPTY;
    }
    size_t done = purge_batch(governor, batch);
    want_no_parts(governor, batch, done);
    size_t purged = 0;
    for (size_t i = 0; i < done; i++) {
        purged += batch->ranges[i].iov_len >> governor->heap.space.page_shift;
    }
    governor->window_purged_pages += purged;
    heap_enter(governor);
    heap_put_back(&governor->heap, batch, done);
    governor->counts.purged_pages += purged;
    publish_limit(governor);
    if (done == 0) {
        back_off(governor);
    } else if (done == batch->count) {
        governor->retry_above_pages = 0;
        governor->retry_after_ns = 0;
    }
    heap_exit(governor);
    return done == 0 ? SLICE_REFUSED : SLICE_PURGED;
}

/* What describes nothing any more goes with what it described. Under the purger's lock, whose batch is free.
 */
static void purge_metadata(struct governor *governor) {
    struct iovec *ranges = governor->batch.ranges;
    heap_enter(governor);
    size_t count = space_take_idle(&governor->heap.space, ranges, PURGE_RANGES);
    heap_exit(governor);
    if (count == 0) {
        return;
    }
    struct purge_result result = purge_ranges(ranges, count);
    heap_enter(governor);
    space_put_idle(&governor->heap.space, ranges, count);
    governor->counts.ranges += result.ranges_done;
    governor->counts.vectored_calls += result.vectored_calls;
    governor->counts.single_calls += result.single_calls;
    heap_exit(governor);
}

/* One call of purge_down, for tracers. */
struct traced {
    bool begun;
    uint64_t pages, ranges, ns; /* as counted before it */
};

/* Before each slice. Under the purger's lock, whose holder alone counts these. */
static void trace_begin(struct traced *traced, const struct governor *governor, size_t pages,
                        enum reason reason) {
    if (traced->begun) {
        return;
    }
    *traced = (struct traced){true, governor->window_purged_pages, governor->counts.ranges,
                              governor->counts.purge_ns};
    if (probe_purge_begin_is_heard()) {
        probe_purge_begin(reason, pages * page_bytes(governor));
    }
}

static void trace_end(const struct traced *traced, const struct governor *governor, enum reason reason) {
    if (traced->begun && probe_purge_end_is_heard()) {
        probe_purge_end(reason, (governor->window_purged_pages - traced->pages) * page_bytes(governor),
                        governor->counts.ranges - traced->ranges, governor->counts.purge_ns - traced->ns);
    }
}

bool purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason) {
    bool purged = false;
    struct traced traced = {0};
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    /* No more than there is now: others may free as fast as this gives back. */
    size_t budget = SIZE_MAX;
    for (;;) {
        heap_enter(governor);
        size_t dirty = heap_dirty_pages(&governor->heap);
        heap_exit(governor);
        size_t excess = dirty > keep ? dirty - keep : 0;
        budget = budget < excess ? budget : excess;
        if (budget == 0) {
            break;
        }
        trace_begin(&traced, governor, budget, reason);
        uint64_t before = governor->window_purged_pages;
        enum slice slice = purge_slice(governor, budget, depth);
        if (governor->owner != NULL) {
            governor->owner->between(governor->owner->context);
        }
        size_t given = governor->window_purged_pages - before;
        budget -= given < budget ? given : budget;
        purged |= slice == SLICE_PURGED;
        if (slice == SLICE_EMPTY && depth < PURGE_SPLIT && dirty > bear) {
            depth++;
        } else if (slice != SLICE_PURGED) {
            break;
        }
    }
    if (purged) {
        purge_metadata(governor);
        heap_enter(governor);
        governor->counts.purges += reason == REASON_LIMIT;
        governor->counts.purges_timed += reason == REASON_TIME;
        governor->counts.purges_asked += reason == REASON_ASKED;
        heap_exit(governor);
    }
    trace_end(&traced, governor, reason);
    return purged;
}

void purge_to_limit(struct governor *governor) {
    for (bool purged = true; purged;) {
        heap_enter(governor);
        struct bound bound = bound_now(governor);
        bool over = is_over(governor, bound.limit);
        heap_exit(governor);
        purged = over && purge_down(governor, bound.keep, bound.limit, REASON_LIMIT);
    }
}

void purger_set_terms(struct governor *governor, enum reason reason) {
    struct retention_terms terms = new_terms(governor);
    for (bool purged = true;;) {
        heap_enter(governor);
        size_t max_used = governor->max_used << governor->heap.space.page_shift;
        terms.peak_bytes = terms.peak_bytes > max_used ? terms.peak_bytes : max_used;
        terms.tended = governor->tended;
        struct bound bound = bound_by(governor, &terms);
        if (!purged || !is_over(governor, bound.limit)) {
            governor->terms = terms;
            publish_limit(governor);
            heap_exit(governor);
            return;
        }
        heap_exit(governor);
        purged = purge_down(governor, bound.keep, bound.limit, reason);
    }
}
