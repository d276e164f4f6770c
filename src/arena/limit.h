/*
 * The limit on the free memory of all arenas together. The policy computes it
 * from what the arenas hold now, by terms that are set once per epoch (terms.h).
 * The functions are inline, since each thread that leaves a heap calls them.
 * They read the totals, which may lag behind the heaps (struct limit_state).
 */
#ifndef CALM_ARENA_LIMIT_H
#define CALM_ARENA_LIMIT_H

#include "arena/arena_probes.h"
#include "arena/select.h"
#include "arena/state.h"
#include "base/size.h"
#include "os/clock.h"

/* However high the price of memory is, this many pages may stay: one for each
 * of a few slabs. */
#define MIN_LIMIT_PAGES 16

/* The total of the pages held may be wrong by this part of what a purge at the
 * limit leaves room for, or by a page for each arena. */
#define BATCH_DIVISOR 16

/* In pages. If more than `max` are free, a purge leaves `keep`. */
struct limit {
    size_t max, keep;
};

static inline bool is_adaptive(const struct arenas *arenas) {
    return setting_value(&arenas->settings.policy) == POLICY_ADAPTIVE;
}

/* What all arenas have reported, in pages. Both are in one word, the used pages in
 * its high half, so that a thread adds to both, and reads both, at once. So of
 * several threads that report concurrently, the last one sees what all have
 * reported. */
struct totals {
    size_t used, dirty;
};

#define TOTALS_SHIFT 32

static inline struct totals unpack_totals(uint64_t word) {
    return (struct totals){word >> TOTALS_SHIFT, word & (((uint64_t)1 << TOTALS_SHIFT) - 1)};
}

static inline struct totals totals_now(const struct arenas *arenas) {
    return unpack_totals(atomic_load_explicit(&arenas->limit.totals, memory_order_seq_cst));
}

static inline size_t used_pages(const struct arenas *arenas) {
    return totals_now(arenas).used;
}

static inline size_t dirty_pages(const struct arenas *arenas) {
    return totals_now(arenas).dirty;
}

static inline size_t used_bytes(const struct arenas *arenas) {
    return used_pages(arenas) << page_shift(arenas);
}

/* Returns the dirty bytes, and those of pages that are being purged, since
 * these are still resident. */
static inline size_t free_bytes(const struct arenas *arenas, struct totals totals) {
    return (totals.dirty + get_total(&arenas->limit.purging_pages)) << page_shift(arenas);
}

static inline struct retention_terms terms_now(const struct arenas *arenas) {
    const struct limit_terms *terms = &arenas->limit.terms;
    return (struct retention_terms){
        .adaptive = atomic_load_explicit(&terms->adaptive, memory_order_relaxed),
        .background_purge = atomic_load_explicit(&terms->background_purge, memory_order_relaxed),
        .factor = atomic_load_explicit(&terms->factor, memory_order_relaxed),
        .peak_bytes = get_total(&terms->peak_bytes),
        .surplus_bytes = get_total(&terms->surplus_bytes),
        .available_bytes = get_total(&terms->available_bytes),
    };
}

static inline struct limit limit_by(const struct arenas *arenas, const struct retention_terms *terms,
                                    struct totals totals) {
    size_t used = totals.used << page_shift(arenas);
    struct retention retention = retention_decide(terms, used, free_bytes(arenas, totals));
    size_t max = retention.limit_bytes >> page_shift(arenas);
    size_t keep = retention.keep_bytes >> page_shift(arenas);
    return (struct limit){size_max(max, MIN_LIMIT_PAGES), keep};
}

static inline struct limit limit_now(const struct arenas *arenas) {
    struct retention_terms terms = terms_now(arenas);
    return limit_by(arenas, &terms, totals_now(arenas));
}

/* Returns the limit that would hold with or without a background purge. */
static inline struct limit limit_if_background(const struct arenas *arenas, bool background_purge) {
    struct retention_terms terms = terms_now(arenas);
    terms.background_purge = background_purge;
    return limit_by(arenas, &terms, totals_now(arenas));
}

/* Returns the limit on free and prefaulted pages together. */
static inline size_t max_prefaulted_pages(const struct arenas *arenas) {
    struct retention_terms terms = terms_now(arenas);
    struct totals totals = totals_now(arenas);
    size_t used = totals.used << page_shift(arenas);
    return retention_prefault_bytes(&terms, used, free_bytes(arenas, totals)) >> page_shift(arenas);
}

static inline void raise_total(_Atomic(size_t) *word, size_t value) {
    size_t now = get_total(word);
    while (now < value && !atomic_compare_exchange_weak_explicit(word, &now, value, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
}

/* Returns the batch of several arenas, or 0 if each change has to be reported. */
static inline size_t batch_by(const struct arenas *arenas, const struct retention_terms *terms,
                              struct totals totals, struct limit limit) {
    uint32_t started = atomic_load_explicit(&arenas->started, memory_order_relaxed);
    size_t held = (totals.used << page_shift(arenas)) + free_bytes(arenas, totals);
    bool may_lag = started > 1 && retention_limits_held(terms, held);
    size_t room = size_minus(limit.max, limit.keep);
    /* A purge ends below the limit by more than the totals may be wrong. */
    return !may_lag || room / 2 < started ? 0 : size_max(room / BATCH_DIVISOR / started, 1);
}

/* Returns the limit. Stores it for readers, and adapts how often the arenas
 * report. */
static inline size_t publish_limit_for(struct arenas *arenas, struct totals totals) {
    struct retention_terms terms = terms_now(arenas);
    struct limit limit = limit_by(arenas, &terms, totals);
    size_t batch = arena_is_alone(arenas) ? 0 : batch_by(arenas, &terms, totals, limit);
    if (batch != get_total(&arenas->limit.batch)) {
        atomic_store_explicit(&arenas->limit.batch, batch, memory_order_relaxed);
        raise_total(&arenas->limit.max_batch, batch);
    }
    if (limit.max != get_total(&arenas->limit.pages)) {
        atomic_store_explicit(&arenas->limit.pages, limit.max, memory_order_relaxed);
        if (probe_limit_is_enabled()) {
            probe_limit(limit.max * page_bytes(arenas));
        }
    }
    return limit.max;
}

/* Returns the limit for a thread that leaves a heap. With several arenas, does
 * not store it: its words would move between the CPUs at each such call. */
static inline size_t limit_at_leave(struct arenas *arenas, struct totals totals) {
    if (arena_is_alone(arenas)) {
        return publish_limit_for(arenas, totals);
    }
    struct retention_terms terms = terms_now(arenas);
    return limit_by(arenas, &terms, totals).max;
}

static inline size_t publish_limit(struct arenas *arenas) {
    return publish_limit_for(arenas, totals_now(arenas));
}

/* Returns the largest batch by which an arena may have left its report. That of
 * the epoch before counts, too, since all arenas report when an epoch begins. */
static inline size_t max_batch(const struct arenas *arenas) {
    return size_max(get_total(&arenas->limit.max_batch), get_total(&arenas->limit.max_batch_before));
}

/* Returns by how much the pages held may exceed the total of the reports. */
static inline size_t report_error(const struct arenas *arenas) {
    return max_batch(arenas) * atomic_load_explicit(&arenas->started, memory_order_relaxed);
}

/* Raises the maxima of this epoch to the totals. */
static inline void note_levels(struct arenas *arenas, struct totals totals) {
    raise_total(&arenas->limit.max_used, totals.used);
    raise_total(&arenas->limit.max_held, totals.used + totals.dirty);
    raise_total(&arenas->limit.terms.peak_bytes, totals.used << page_shift(arenas));
}

/* Adds to the totals what has changed in the arena since its last report, and
 * returns them. The caller holds the heap's lock, or no other thread runs. */
static inline struct totals report_levels(struct arenas *arenas, struct arena *arena) {
    size_t used = heap_used_pages(&arena->heap);
    size_t dirty = heap_dirty_pages(&arena->heap);
    /* A forked child writes no word that keeps its value. */
    if (get_total(&arena->free_pages) != dirty) {
        atomic_store_explicit(&arena->free_pages, dirty, memory_order_relaxed);
    }
    if (atomic_load_explicit(&arena->has_changed, memory_order_relaxed)) {
        atomic_store_explicit(&arena->has_changed, false, memory_order_relaxed);
    }
    /* A decrease of the low half borrows from the high half. The sum is right
     * nevertheless, since no total is negative. */
    uint64_t more =
        ((uint64_t)(used - arena->reported_used) << TOTALS_SHIFT) + (dirty - arena->reported_dirty);
    if (more == 0) {
        return totals_now(arenas);
    }
    arena->reported_used = used;
    arena->reported_dirty = dirty;
    uint64_t before = atomic_fetch_add_explicit(&arenas->limit.totals, more, memory_order_seq_cst);
    return unpack_totals(before + more);
}

/* Returns whether the pages that the arena holds have changed by more than a
 * batch, or the used ones have grown by more. What becomes free again is not
 * reported: the limit is then as much higher, and a thread that takes and frees
 * blocks writes no word of all arenas. */
static inline bool is_report_due(const struct arenas *arenas, const struct arena *arena) {
    size_t batch = get_total(&arenas->limit.batch);
    size_t used = heap_used_pages(&arena->heap);
    size_t held = used + heap_dirty_pages(&arena->heap);
    size_t reported = arena->reported_used + arena->reported_dirty;
    return batch == 0 || size_max(held, reported) - size_min(held, reported) > batch ||
           used > arena->reported_used + batch || reported == 0;
}

/* Leaves the totals as they are. The caller holds the heap's lock. */
static inline void defer_report(struct arena *arena) {
    atomic_store_explicit(&arena->free_pages, heap_dirty_pages(&arena->heap), memory_order_relaxed);
    atomic_store_explicit(&arena->has_changed, true, memory_order_relaxed);
}

/* Makes the totals exact. The caller holds no heap's lock. */
static inline void report_all(struct arenas *arenas) {
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        if (atomic_load_explicit(&arena->has_changed, memory_order_relaxed)) {
            heap_lock(arena);
            report_levels(arenas, arena);
            heap_unlock(arena);
        }
    }
    note_levels(arenas, totals_now(arenas));
}

/* Returns whether an arena that is short is to take from another one before it
 * grows: once as much is free as a purge leaves. Until then each gets memory of
 * its own. Otherwise they would take from each other for ever. */
static inline bool takes_from_others(const struct arenas *arenas) {
    return !arena_is_alone(arenas) && dirty_pages(arenas) >= limit_now(arenas).keep;
}

/* Ends the back-off some time after the kernel refused a purge. Another purge
 * may then be tried, however little is free. */
static inline void end_backoff(struct arenas *arenas) {
    if (get_total(&arenas->limit.retry_above_pages) != 0 &&
        clock_coarse_ns() > atomic_load_explicit(&arenas->purger.retry_ns, memory_order_relaxed)) {
        atomic_store_explicit(&arenas->limit.retry_above_pages, 0, memory_order_relaxed);
    }
}

static inline bool may_purge(const struct arenas *arenas, size_t dirty) {
    size_t above = get_total(&arenas->limit.retry_above_pages);
    return above == 0 || dirty > above;
}

/* Returns whether dirty memory may exceed a limit, and a purge may be tried. */
static inline bool is_dirty_over(const struct arenas *arenas, size_t dirty, size_t limit) {
    return dirty > size_minus(limit, report_error(arenas)) && may_purge(arenas, dirty);
}

static inline bool is_over(const struct arenas *arenas, size_t limit) {
    return is_dirty_over(arenas, dirty_pages(arenas), limit);
}

/* In a program that uses less memory than this, prefaulted pages that the
 * program never uses would be a large part of its memory. */
#define MIN_AHEAD_USED_BYTES ((size_t)16 << 20)

/* Returns whether a huge-page region may be made. The program must use enough
 * memory, together with the `pages` that it requests. The region is free memory
 * that will be resident, and must stay well within the limit. */
static inline bool allows_region(const struct arenas *arenas, size_t pages) {
    size_t region = arenas->of[0].heap.runs.region_pages;
    return region != 0 && setting_value(&arenas->settings.huge_pages) != 0 &&
           (used_pages(arenas) + pages) * page_bytes(arenas) >= MIN_AHEAD_USED_BYTES &&
           dirty_pages(arenas) + region <= max_prefaulted_pages(arenas) / 2;
}

#endif
