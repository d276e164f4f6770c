/*
 * The bound on free memory in the heap: what the policy says for what the heap has now, by terms that are set
 * once a window.
 */
#ifndef CALM_GOVERNOR_BOUND_H
#define CALM_GOVERNOR_BOUND_H

#include "governor/governor.h"
#include "governor/probes.h"
#include "os/clock.h"

/* A person can ask for so little slack that nothing is kept; a page for each of a few slabs stays all the
 * same. */
#define LIMIT_PAGES_LEAST 16

static inline size_t page_bytes(const struct governor *governor) {
    return governor->heap.space.page_size;
}

static inline double setting_value(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

static inline bool is_adaptive(const struct governor *governor) {
    return setting_value(&governor->settings.policy) == POLICY_ADAPTIVE;
}

/* In pages. */
struct bound {
    size_t limit, keep;
};

static inline size_t used_bytes(const struct governor *governor) {
    return heap_used_pages(&governor->heap) << governor->heap.space.page_shift;
}

/* What is on its way to the kernel is resident as well. */
static inline size_t free_bytes(const struct governor *governor) {
    const struct heap *heap = &governor->heap;
    return (heap_dirty_pages(heap) + heap->purging_pages) << heap->space.page_shift;
}

/* Free pages, and all that were given back: so a purge does not look like a use. Under the heap's lock. */
static inline size_t free_and_given_pages(const struct governor *governor) {
    const struct heap *heap = &governor->heap;
    return heap_dirty_pages(heap) + heap->purging_pages + governor->counts.purged_pages;
}

/* Under the heap's lock. */
static inline struct bound bound_by(const struct governor *governor, const struct retention_terms *terms) {
    struct retention retention = retention_decide(terms, used_bytes(governor), free_bytes(governor));
    size_t limit = retention.limit_bytes >> governor->heap.space.page_shift;
    size_t keep = retention.keep_bytes >> governor->heap.space.page_shift;
    return (struct bound){limit < LIMIT_PAGES_LEAST ? LIMIT_PAGES_LEAST : limit, keep};
}

static inline struct bound bound_now(const struct governor *governor) {
    return bound_by(governor, &governor->terms);
}

static inline size_t limit_pages(const struct governor *governor) {
    return bound_now(governor).limit;
}

/* The bound on free pages and those that are made resident ahead of use. Under the heap's lock. */
static inline size_t max_ahead_pages(const struct governor *governor) {
    return retention_ahead_bytes(&governor->terms, used_bytes(governor), free_bytes(governor)) >>
           governor->heap.space.page_shift;
}

/* The bound, left where others may read it. Under the heap's lock. */
static inline size_t publish_limit(struct governor *governor) {
    size_t limit = limit_pages(governor);
    if (limit != governor->limit_pages) {
        governor->limit_pages = limit;
        if (probe_limit_is_heard()) {
            probe_limit(limit * page_bytes(governor));
        }
    }
    return limit;
}

/* What the policy is to go by until the next window is over, but for whether the heap is tended. Under the
 * purger's lock. */
static inline struct retention_terms new_terms(const struct governor *governor) {
    unsigned shift = governor->heap.space.page_shift;
    const struct demand *demand = &governor->demand;
    double slack = setting_value(&governor->settings.slack) / 100;
    return (struct retention_terms){
        .adaptive = is_adaptive(governor),
        .factor = hysteresis_factor(governor->cpu_usage.cpus, slack),
        .share = slack < 1 ? slack : 1,
        .peak_bytes = demand_peak_pages(demand) << shift,
        .held_bytes = demand_held_pages(demand) << shift,
        .room_bytes = atomic_load_explicit(&governor->room_bytes, memory_order_relaxed),
    };
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
