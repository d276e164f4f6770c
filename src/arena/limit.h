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

/* With several arenas, each may hold this much before it takes from others, which
 * would cost their locks. The peak may be as much too high. */
#define OWN_BYTES ((size_t)1 << 20)

/* In pages. If more than `max` are free, a purge leaves `keep`. */
struct limit {
    size_t max, keep;
};

static inline bool is_adaptive(const struct arenas *arenas) {
    return setting_value(&arenas->settings.policy) == POLICY_ADAPTIVE;
}

static inline struct levels totals_now(const struct arenas *arenas) {
    return unpack_levels(atomic_load_explicit(&arenas->limit.totals, memory_order_seq_cst));
}

/* Returns the levels of all arenas when threads last left them. Reads a word of
 * each arena, while totals_now reads one word. */
static inline struct levels sum_levels(const struct arenas *arenas) {
    uint64_t sum = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        sum += atomic_load_explicit(&arena->levels, memory_order_relaxed);
    }
    return unpack_levels(sum);
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
static inline size_t free_bytes(const struct arenas *arenas, struct levels totals) {
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
                                    struct levels totals) {
    size_t used = totals.used << page_shift(arenas);
    struct retention retention = retention_decide(terms, used, free_bytes(arenas, totals));
    size_t max = retention.limit_bytes >> page_shift(arenas);
    size_t keep = retention.keep_bytes >> page_shift(arenas);
    return (struct limit){size_max(max, MIN_LIMIT_PAGES), keep};
}

static inline struct limit limit_for(const struct arenas *arenas, struct levels totals) {
    struct retention_terms terms = terms_now(arenas);
    return limit_by(arenas, &terms, totals);
}

/* Returns the limit that would hold with or without a background purge. */
static inline struct limit limit_if_background(const struct arenas *arenas, struct levels totals,
                                               bool background_purge) {
    struct retention_terms terms = terms_now(arenas);
    terms.background_purge = background_purge;
    return limit_by(arenas, &terms, totals);
}

/* Returns the limit on what a fork shares with the child. */
static inline struct limit limit_at_fork(const struct arenas *arenas, struct levels totals) {
    struct retention_terms terms = terms_now(arenas);
    size_t most = size_max(retention_little_bytes(&terms) >> page_shift(arenas), MIN_LIMIT_PAGES);
    struct limit limit = limit_by(arenas, &terms, totals);
    return limit.max <= most || !terms.adaptive ? limit : (struct limit){most, most / 2};
}

/* Returns the limit on free and prefaulted pages together. */
static inline size_t max_prefaulted_pages(const struct arenas *arenas, struct levels totals) {
    struct retention_terms terms = terms_now(arenas);
    size_t used = totals.used << page_shift(arenas);
    return retention_prefault_bytes(&terms, used, free_bytes(arenas, totals)) >> page_shift(arenas);
}

static inline void raise_total(_Atomic(size_t) *word, size_t value) {
    size_t now = get_total(word);
    while (now < value && !atomic_compare_exchange_weak_explicit(word, &now, value, memory_order_relaxed,
                                                                 memory_order_relaxed)) {
    }
}

/* Returns whether the reports of several arenas may lag, since only what they
 * hold decides whether a purge starts. */
static inline bool reports_may_lag(const struct arenas *arenas, struct levels totals) {
    struct retention_terms terms = terms_now(arenas);
    size_t held = (totals.used << page_shift(arenas)) + free_bytes(arenas, totals);
    return retention_limits_held(&terms, held);
}

/* Returns the batch, or 0 if each change has to be reported. */
static inline size_t batch_now(const struct arenas *arenas) {
    size_t started = atomic_load_explicit(&arenas->started, memory_order_relaxed);
    struct levels totals = totals_now(arenas);
    if (started <= 1 || !reports_may_lag(arenas, totals)) {
        return 0;
    }
    struct limit limit = limit_for(arenas, totals);
    size_t room = size_minus(limit.max, limit.keep);
    /* A purge ends below the limit by more than the totals may be wrong. */
    return room / 2 < started ? 0 : size_max(room / BATCH_DIVISOR / started, 1);
}

/* Returns whether the reports lag although they may not. */
static inline bool batch_is_stale(const struct arenas *arenas, struct levels totals) {
    return get_total(&arenas->limit.batch) > 0 && !reports_may_lag(arenas, totals);
}

/* Adapts how often the arenas report. The caller holds the purger's lock, or no
 * other thread runs. */
static inline void adapt_batch(struct arenas *arenas) {
    size_t batch = batch_now(arenas);
    if (batch != get_total(&arenas->limit.batch)) {
        raise_total(&arenas->limit.max_batch, batch);
        atomic_store_explicit(&arenas->limit.batch, batch, memory_order_relaxed);
    }
}

/* Returns the limit, and stores it for readers. */
static inline size_t publish_limit_for(struct arenas *arenas, struct levels totals) {
    struct limit limit = limit_for(arenas, totals);
    if (limit.max != get_total(&arenas->limit.pages)) {
        atomic_store_explicit(&arenas->limit.pages, limit.max, memory_order_relaxed);
        if (probe_limit_is_enabled()) {
            probe_limit(limit.max * page_bytes(arenas));
        }
    }
    return limit.max;
}

/* Returns the limit for a thread that leaves a heap. With several arenas, does
 * not store it: its word would move between the CPUs at each such call. */
static inline size_t limit_at_leave(struct arenas *arenas, struct levels totals) {
    if (arena_is_alone(arenas)) {
        return publish_limit_for(arenas, totals);
    }
    return limit_for(arenas, totals).max;
}

static inline size_t publish_limit(struct arenas *arenas) {
    return publish_limit_for(arenas, totals_now(arenas));
}

/* Returns by how much the pages held may exceed the total of the reports. */
static inline size_t report_error(const struct arenas *arenas) {
    return get_total(&arenas->limit.max_batch) * atomic_load_explicit(&arenas->started, memory_order_relaxed);
}

/* Raises the maxima of this epoch to the totals. Returns the totals. If they
 * would raise the maximum, no more counts as used than is in use at once, plus
 * OWN_BYTES for each arena, since reports of other arenas may be of other times.
 * The maximum may miss what arenas use again without a report. */
static inline struct levels note_levels(struct arenas *arenas, struct levels totals) {
    size_t held = totals.used + totals.dirty;
    if (!arena_is_alone(arenas) && totals.used > get_total(&arenas->limit.max_used)) {
        size_t started = atomic_load_explicit(&arenas->started, memory_order_relaxed);
        size_t own = started * OWN_BYTES >> page_shift(arenas);
        totals.used = size_min(totals.used, sum_levels(arenas).used + own);
        totals.dirty = held - totals.used;
    }
    raise_total(&arenas->limit.max_used, totals.used);
    raise_total(&arenas->limit.max_held, held);
    raise_total(&arenas->limit.terms.peak_bytes, totals.used << page_shift(arenas));
    return totals;
}

/* Stores and returns what the arena holds. The caller holds the heap's lock, or
 * no other thread runs. */
static inline uint64_t publish_levels(struct arena *arena) {
    uint64_t levels = pack_levels(heap_used_pages(&arena->heap), heap_dirty_pages(&arena->heap));
    /* A forked child writes no word that keeps its value. */
    if (levels != atomic_load_explicit(&arena->levels, memory_order_relaxed)) {
        atomic_store_explicit(&arena->levels, levels, memory_order_relaxed);
    }
    return levels;
}

/* Adds to the totals what has changed in the arena since its last report, and
 * returns them. The caller holds the heap's lock, or no other thread runs. */
static inline struct levels report_levels(struct arenas *arenas, struct arena *arena) {
    uint64_t levels = publish_levels(arena);
    uint64_t more = levels - arena->reported;
    if (more == 0) {
        return totals_now(arenas);
    }
    arena->reported = levels;
    uint64_t before = atomic_fetch_add_explicit(&arenas->limit.totals, more, memory_order_seq_cst);
    return unpack_levels(before + more);
}

/* Returns whether the pages that the arena holds have changed by more than a
 * batch, or the used ones have grown by more. What becomes free again is not
 * reported: the limit is then as much higher, and a thread that takes and frees
 * blocks writes no word of all arenas. */
static inline bool is_report_due(const struct arenas *arenas, const struct arena *arena) {
    size_t batch = get_total(&arenas->limit.batch);
    size_t used = heap_used_pages(&arena->heap);
    size_t held = used + heap_dirty_pages(&arena->heap);
    struct levels reported = unpack_levels(arena->reported);
    size_t before = reported.used + reported.dirty;
    return batch == 0 || size_max(held, before) - size_min(held, before) > batch ||
           used > reported.used + batch || before == 0;
}

/* Makes the totals exact, and returns them (note_levels). Adapts the batch
 * before, so that a thread that comes to a heap after its report sees the new
 * one. The caller holds the purger's lock, and no heap's. */
static inline struct levels report_all(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    struct levels totals;
    do {
        adapt_batch(arenas);
        bool several = !arena_is_alone(arenas);
        unsigned number = 0;
        for (struct arena *arena; several && (arena = arena_next(arenas, &number)) != NULL;) {
            heap_lock(arena);
            report_levels(arenas, arena);
            heap_unlock(arena);
        }
        atomic_store_explicit(&arenas->limit.max_batch, get_total(&arenas->limit.batch),
                              memory_order_relaxed);
        totals = note_levels(arenas, totals_now(arenas));
    } while (batch_is_stale(arenas, totals)); /* the peak has risen */
    return totals;
}

/* Returns whether an arena that is short is to take from another one before it
 * grows by this number of pages: once as much is free as a purge leaves. Until
 * then each gets memory of its own. Otherwise they would take from each other for
 * ever. The caller holds the heap's lock. */
static inline bool takes_from_others(const struct arenas *arenas, const struct arena *arena, size_t pages) {
    size_t held = heap_used_pages(&arena->heap) + heap_dirty_pages(&arena->heap);
    if (arena_is_alone(arenas) || (held + pages) * page_bytes(arenas) <= OWN_BYTES) {
        return false;
    }
    struct levels totals = sum_levels(arenas);
    return totals.dirty >= limit_for(arenas, totals).keep;
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
static inline bool is_over(const struct arenas *arenas, size_t dirty, size_t limit) {
    return dirty > size_minus(limit, report_error(arenas)) && may_purge(arenas, dirty);
}

/* In a program that uses less memory than this, prefaulted pages that the
 * program never uses would be a large part of its memory. */
#define MIN_AHEAD_USED_BYTES ((size_t)16 << 20)

/* Returns whether a huge-page region may be made. The program must use enough
 * memory, together with the `pages` that it requests. The region is free memory
 * that will be resident, and must stay well within the limit. */
static inline bool allows_region(const struct arenas *arenas, const struct arena *arena, size_t pages) {
    struct levels totals = sum_levels(arenas);
    return setting_value(&arenas->settings.huge_pages) != 0 &&
           (totals.used + pages) * page_bytes(arenas) >= MIN_AHEAD_USED_BYTES &&
           totals.dirty + arena->heap.runs.region_pages <= max_prefaulted_pages(arenas, totals) / 2;
}

#endif
