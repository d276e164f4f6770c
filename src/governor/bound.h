/*
 * The bound on free memory in the heap: the policy's threshold for the footprint, times a factor that follows
 * settings, CPU use, the band and shortage.
 */
#ifndef CALM_GOVERNOR_BOUND_H
#define CALM_GOVERNOR_BOUND_H

#include "governor/governor.h"
#include "os/clock.h"
#include "policy/hysteresis.h"

/* A person can ask for so little slack that nothing is kept; a page for each of a few slabs stays all the
 * same. */
#define LIMIT_PAGES_LEAST 16
/* Under shortage the bound is this part of the policy's. */
#define SHORTAGE_FACTOR 0.125

static inline size_t page_bytes(const struct governor *governor) {
    return governor->heap.space.page_size;
}

static inline double setting_value(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

static inline bool is_adaptive(const struct governor *governor) {
    return setting_value(&governor->settings.policy) == POLICY_ADAPTIVE;
}

/* Under the heap's lock. */
static inline size_t limit_pages_by(const struct governor *governor, double factor) {
    const struct heap *heap = &governor->heap;
    size_t footprint = heap_used_pages(heap) + heap_dirty_pages(heap) + heap->purging_pages;
    size_t base = hysteresis_base_bytes(footprint << heap->space.page_shift);
    size_t pages = (size_t)((double)base * factor) >> heap->space.page_shift;
    return pages < LIMIT_PAGES_LEAST ? LIMIT_PAGES_LEAST : pages;
}

static inline size_t limit_pages(const struct governor *governor) {
    return limit_pages_by(governor, governor->factor);
}

/* The same, left where others may read it. */
static inline size_t publish_limit(struct governor *governor) {
    governor->limit_pages = limit_pages(governor);
    return governor->limit_pages;
}

/* Under the purger's lock. */
static inline double new_factor(struct governor *governor) {
    double cpus = governor->cpu_usage.cpus;
    double factor = (1 + cpus / 100) * setting_value(&governor->settings.slack) / 100;
    if (is_adaptive(governor)) {
        factor *= governor->band;
        factor *= governor->memory_is_short ? SHORTAGE_FACTOR : 1;
    }
    return factor;
}

/* A while after a refusal it may be tried again, however much there is. Under the heap's lock. */
static inline void forgive(struct governor *governor) {
    if (governor->retry_above_pages != 0 && clock_coarse_ns() > governor->retry_ns) {
        governor->retry_above_pages = 0;
    }
}

static inline bool may_retry(const struct governor *governor, size_t dirty) {
    return governor->retry_above_pages == 0 || dirty > governor->retry_above_pages;
}

/* Whether free memory exceeds the bound. Under the heap's lock. */
static inline bool is_over(struct governor *governor, size_t limit) {
    size_t dirty = heap_dirty_pages(&governor->heap);
    return dirty > limit && may_retry(governor, dirty);
}

/* What a program uses before a huge page that it does not fill is little to it. */
#define HUGE_USED_BYTES_LEAST ((size_t)16 << 20)

/* Whether it is so large, with so many pages more. Under the heap's lock. */
static inline bool uses_enough_for_huge_pages(const struct governor *governor, size_t pages) {
    return (heap_used_pages(&governor->heap) + pages) * page_bytes(governor) >= HUGE_USED_BYTES_LEAST;
}

#endif
