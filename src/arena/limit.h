/*
 * The limit on free memory in the heap. The policy computes it from what the
 * heap holds now, by terms that are set once per epoch (terms.h). The functions
 * are inline, since each thread that leaves the heap checks the limit. The
 * caller holds the heap's lock.
 */
#ifndef CALM_ARENA_LIMIT_H
#define CALM_ARENA_LIMIT_H

#include "arena/arena_probes.h"
#include "arena/state.h"
#include "base/size.h"
#include "os/clock.h"

/* However high the price of memory is, this many pages may stay: one for each
 * of a few slabs. */
#define MIN_LIMIT_PAGES 16

/* In pages. If more than `max` are free, a purge leaves `keep`. */
struct limit {
    size_t max, keep;
};

static inline bool is_adaptive(const struct arena *arena) {
    return setting_value(&arena->settings.policy) == POLICY_ADAPTIVE;
}

static inline size_t used_bytes(const struct arena *arena) {
    return heap_used_pages(&arena->heap) << arena->heap.space.page_shift;
}

/* Returns the pages in use and the dirty pages together. */
static inline size_t footprint_pages(const struct arena *arena) {
    return heap_used_pages(&arena->heap) + heap_dirty_pages(&arena->heap);
}

/* Returns the dirty bytes, and those of pages that are being purged, since
 * these are still resident. */
static inline size_t free_bytes(const struct arena *arena) {
    const struct heap *heap = &arena->heap;
    return (heap_dirty_pages(heap) + heap->purging_pages) << heap->space.page_shift;
}

static inline struct limit limit_by(const struct arena *arena, const struct retention_terms *terms) {
    struct retention retention = retention_decide(terms, used_bytes(arena), free_bytes(arena));
    size_t max = retention.limit_bytes >> arena->heap.space.page_shift;
    size_t keep = retention.keep_bytes >> arena->heap.space.page_shift;
    return (struct limit){size_max(max, MIN_LIMIT_PAGES), keep};
}

static inline struct limit limit_now(const struct arena *arena) {
    return limit_by(arena, &arena->limit.terms);
}

/* Returns the limit that would hold with or without a background purge. */
static inline struct limit limit_if_background(const struct arena *arena, bool background_purge) {
    struct retention_terms terms = arena->limit.terms;
    terms.background_purge = background_purge;
    return limit_by(arena, &terms);
}

/* Returns the limit on free and prefaulted pages together. */
static inline size_t max_prefaulted_pages(const struct arena *arena) {
    return retention_prefault_bytes(&arena->limit.terms, used_bytes(arena), free_bytes(arena)) >>
           arena->heap.space.page_shift;
}

/* Stores the limit for readers without the lock, and returns it. */
static inline size_t publish_limit(struct arena *arena) {
    size_t limit = limit_now(arena).max;
    if (limit != arena->limit.pages) {
        arena->limit.pages = limit;
        if (probe_limit_is_enabled()) {
            probe_limit(limit * page_bytes(arena));
        }
    }
    return limit;
}

/* Ends the back-off some time after the kernel refused a purge. Another purge
 * may then be tried, however little is free. */
static inline void end_backoff(struct arena *arena) {
    if (arena->limit.retry_above_pages != 0 && clock_coarse_ns() > arena->purger.retry_ns) {
        arena->limit.retry_above_pages = 0;
    }
}

static inline bool may_purge(const struct arena *arena, size_t dirty) {
    return arena->limit.retry_above_pages == 0 || dirty > arena->limit.retry_above_pages;
}

/* Returns whether dirty memory exceeds a limit, and a purge may be tried. */
static inline bool is_over(const struct arena *arena, size_t limit) {
    size_t dirty = heap_dirty_pages(&arena->heap);
    return dirty > limit && may_purge(arena, dirty);
}

/* In a program that uses less memory than this, prefaulted pages that the
 * program never uses would be a large part of its memory. */
#define MIN_AHEAD_USED_BYTES ((size_t)16 << 20)

/* Returns whether a huge-page region may be made. The program must use enough
 * memory, together with the `pages` that it requests. The region is free memory
 * that will be resident, and must stay well within the limit. */
static inline bool allows_region(const struct arena *arena, size_t pages) {
    size_t region = arena->heap.runs.region_pages;
    return region != 0 && setting_value(&arena->settings.huge_pages) != 0 &&
           (heap_used_pages(&arena->heap) + pages) * page_bytes(arena) >= MIN_AHEAD_USED_BYTES &&
           heap_dirty_pages(&arena->heap) + region <= max_prefaulted_pages(arena) / 2;
}

#endif
