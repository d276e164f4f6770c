/*
 * The limit on free memory in the heap: what the policy says for what the heap holds now, by terms that are
 * set once an epoch (terms.h). Inline, since each thread that leaves the heap checks it. All under the heap's
 * lock.
 */
#ifndef CALM_GOVERNOR_LIMIT_H
#define CALM_GOVERNOR_LIMIT_H

#include "base/size.h"
#include "governor/probes.h"
#include "governor/state.h"
#include "os/clock.h"

/* A page for each of a few slabs may stay, however costly memory is. */
#define MIN_LIMIT_PAGES 16

/* In pages: free memory above max is purged until keep stays. */
struct limit {
    size_t max, keep;
};

static inline bool is_adaptive(const struct governor *governor) {
    return setting_value(&governor->settings.policy) == POLICY_ADAPTIVE;
}

static inline size_t used_bytes(const struct governor *governor) {
    return heap_used_pages(&governor->heap) << governor->heap.space.page_shift;
}

/* In use or free, as far as they may be resident. */
static inline size_t footprint_pages(const struct governor *governor) {
    return heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
}

/* Pages on their way to the kernel are still resident. */
static inline size_t free_bytes(const struct governor *governor) {
    const struct heap *heap = &governor->heap;
    return (heap_dirty_pages(heap) + heap->purging_pages) << heap->space.page_shift;
}

static inline struct limit limit_by(const struct governor *governor, const struct retention_terms *terms) {
    struct retention retention = retention_decide(terms, used_bytes(governor), free_bytes(governor));
    size_t max = retention.limit_bytes >> governor->heap.space.page_shift;
    size_t keep = retention.keep_bytes >> governor->heap.space.page_shift;
    return (struct limit){size_max(max, MIN_LIMIT_PAGES), keep};
}

static inline struct limit limit_now(const struct governor *governor) {
    return limit_by(governor, &governor->terms);
}

/* What the limit would be with or without a background purge. */
static inline struct limit limit_if_background(const struct governor *governor, bool background_purge) {
    struct retention_terms terms = governor->terms;
    terms.background_purge = background_purge;
    return limit_by(governor, &terms);
}

/* The limit on free pages and prefaulted ones together. */
static inline size_t max_prefaulted_pages(const struct governor *governor) {
    return retention_prefault_bytes(&governor->terms, used_bytes(governor), free_bytes(governor)) >>
           governor->heap.space.page_shift;
}

/* Stores the limit for readers without the lock, and returns it. */
static inline size_t publish_limit(struct governor *governor) {
    size_t limit = limit_now(governor).max;
    if (limit != governor->limit_pages) {
        governor->limit_pages = limit;
        if (probe_limit_is_enabled()) {
            probe_limit(limit * page_bytes(governor));
        }
    }
    return limit;
}

/* A while after the kernel refused a purge another may be tried, however little is free. */
static inline void end_backoff(struct governor *governor) {
    if (governor->retry_above_pages != 0 && clock_coarse_ns() > governor->retry_ns) {
        governor->retry_above_pages = 0;
    }
}

static inline bool may_purge(const struct governor *governor, size_t dirty) {
    return governor->retry_above_pages == 0 || dirty > governor->retry_above_pages;
}

/* Whether free memory exceeds a limit, and a purge may be tried. */
static inline bool is_over(const struct governor *governor, size_t limit) {
    size_t dirty = heap_dirty_pages(&governor->heap);
    return dirty > limit && may_purge(governor, dirty);
}

/* Below this, memory that is resident before it is used, and never used, would be a large part of what the
 * program uses. */
#define MIN_AHEAD_USED_BYTES ((size_t)16 << 20)

/* Whether a huge-page region may be made: if the program uses enough, with so many pages more, and the
 * region, which is free but will be resident, is well within the limit. */
static inline bool allows_region(const struct governor *governor, size_t pages) {
    size_t region = governor->heap.runs.region_pages;
    return region != 0 && setting_value(&governor->settings.huge_pages) != 0 &&
           (heap_used_pages(&governor->heap) + pages) * page_bytes(governor) >= MIN_AHEAD_USED_BYTES &&
           heap_dirty_pages(&governor->heap) + region <= max_prefaulted_pages(governor) / 2;
}

#endif
