#include "arena/epoch.h"

#include "arena/fault_cost.h"
#include "arena/flush.h"
#include "arena/limit.h"
#include "arena/purger.h"
#include "arena/select.h"
#include "arena/terms.h"
#include "base/assert.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/memory.h"
#include "os/residency.h"

#define FOOTPRINT_READ_NS 1000000000ULL
/* The coarse clock lags by up to this time, and so an epoch may be shorter by
 * this time. */
#define EPOCH_TICK_NS 10000000ULL
/* Fewer pages are not worth a system call in each epoch. */
#define MIN_UNUSED_PAGES 16
/* Clean memory is examined at the end of one epoch in this many. */
#define EXAMINED_EPOCHS 4
/* The cost of a fault is measured again at the end of one epoch in this
 * many. */
#define MEASURED_EPOCHS 8
/* The cost of a page fault that the policy assumes before the first purge. The
 * measured cost replaces it afterwards. */
#define FAULT_NS 1000.0

/* Holds no lock, since a file may be slow to read, and threads that allocate or
 * fork would wait for the lock. Only one thread reads files: the helper, or the
 * only thread of a program without a helper. */
void epoch_read_machine(struct arenas *arenas, bool own_files) {
    uint64_t now = clock_coarse_ns();
    /* A helper that shares the program's file table opens no file, even if the
     * program has only one thread. */
    bool may_open = own_files || (thread_may_open_files() && !arena_has_helper(arenas));
    uint64_t read_ns = atomic_load_explicit(&arenas->machine.read_ns, memory_order_relaxed);
    size_t bytes = SIZE_MAX;
    double scarcity_factor = 1;
    if (setting_value(&arenas->settings.watch_cgroup)) {
        if (!may_open || clock_elapsed_ns(now, read_ns) < FOOTPRINT_READ_NS) {
            return;
        }
        atomic_store_explicit(&arenas->machine.read_ns, now, memory_order_relaxed);
        size_t held = (used_pages(arenas) + dirty_pages(arenas)) * page_bytes(arenas);
        size_t limit;
        size_t room = memory_available_bytes("", &limit);
        bytes = room < SIZE_MAX - held ? held + room : SIZE_MAX;
        scarcity_factor = room < limit / 2 ? 2 * (double)room / (double)limit : 1;
        arenas->machine.cpu_quota =
            arenas->machine.cpu_quota > 0 ? arenas->machine.cpu_quota : cgroup_cpu_quota("");
        note_offer(arenas, limit, arenas->machine.cpu_quota);
    }
    calm_assert(scarcity_factor >= 0 && scarcity_factor <= 1);
    atomic_store_explicit(&arenas->machine.scarcity_factor, scarcity_factor, memory_order_relaxed);
    atomic_store_explicit(&arenas->machine.max_footprint, bytes, memory_order_relaxed);
}

/* Returns the CPU time of all threads in an epoch of `ns` nanoseconds. */
static double cpu_ns_used(struct arenas *arenas, double ns) {
    if (filters_now() == FILTERS_ADDED) { /* an added filter may forbid the system call */
        return arenas->epoch.cpu_usage.cpus * ns;
    }
    uint64_t before = arenas->epoch.cpu_ns;
    arenas->epoch.cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    return arenas->epoch.cpu_ns > before ? (double)(arenas->epoch.cpu_ns - before) : 0;
}

/* Returns the number of checks of all arenas. */
static uint64_t count_checks(const struct arenas *arenas) {
    uint64_t checks = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        checks += atomic_load_explicit(&arena->checks, memory_order_relaxed);
    }
    return checks;
}

/* Pages, of all arenas, since the start. */
struct fault_counts {
    size_t faulted, sparse; /* see struct runs */
};

/* Begins an epoch of each arena. Returns the counts, and stores the totals. */
static struct fault_counts begin_epoch(struct arenas *arenas, struct levels *totals) {
    struct fault_counts counts = {0};
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        heap_lock(arena);
        counts.faulted += arena->heap.runs.faulted_pages;
        counts.sparse += arena->heap.runs.sparse_pages;
        runs_set_now(&arena->heap.runs, runs_now(&arena->heap.runs) + 1U);
        heap_unlock(arena);
    }
    *totals = report_all(arenas);
    return counts;
}

/* Returns what the epoch showed, and begins the next one. The caller holds the
 * purger's lock. */
static struct demand_epoch read_epoch(struct arenas *arenas, double ns) {
    end_backoff(arenas);
    struct levels totals;
    struct fault_counts counts = begin_epoch(arenas, &totals);
    calm_assert(counts.faulted >= arenas->epoch.faulted_pages, counts.faulted, arenas->epoch.faulted_pages);
    size_t used = totals.used;
    size_t dirty = totals.dirty;
    struct demand_epoch epoch = {
        .ns = ns,
        .max_used = size_max(get_total(&arenas->limit.max_used), used),
        .used_last = used,
        .max_held = size_max(get_total(&arenas->limit.max_held), used + dirty),
        .purged_pages = arenas->epoch.purged_pages,
        .faulted_pages = counts.faulted - arenas->epoch.faulted_pages,
        .sparse_pages = counts.sparse - arenas->epoch.sparse_pages,
        .purge_ns = (double)arenas->epoch.purge_ns,
    };
    atomic_store_explicit(&arenas->limit.max_used, used, memory_order_relaxed);
    atomic_store_explicit(&arenas->limit.max_held, used + dirty, memory_order_relaxed);
    /* Pages that were free at both ends of the epoch count as free for all of
     * it. */
    double kept = (double)(size_min(arenas->epoch.dirty_pages, dirty) * page_bytes(arenas));
    add_count(&arenas->counts.kept_byte_seconds, (uint64_t)(kept * (ns / 1e9)));
    arenas->epoch.dirty_pages = dirty;
    /* If no thread came to a heap, all memory that is not worth keeping is
     * purged, even an amount that is too small for a purge in each epoch. */
    uint64_t checks = count_checks(arenas);
    bool untouched = checks == atomic_load_explicit(&arenas->epoch.checks, memory_order_relaxed);
    atomic_store_explicit(&arenas->epoch.checks, checks, memory_order_relaxed);
    arenas->epoch.untouched = untouched ? arenas->epoch.untouched + 1 : 0;
    arenas->epoch.faulted_pages = counts.faulted;
    arenas->epoch.sparse_pages = counts.sparse;
    arenas->epoch.purge_ns = 0;
    arenas->epoch.purged_pages = 0;
    epoch.cpu_ns = cpu_ns_used(arenas, ns);
    return epoch;
}

/*
 * Examines some of the clean memory.
 *
 * Clean memory is not resident, unless something that the allocator does not
 * see made it so. For example, the program may have requested huge pages by a
 * system call of its own. What is found resident counts as dirty, so that it is
 * purged again. The caller holds the purger's lock.
 */
static void examine_clean(struct arenas *arenas) {
    if (arenas->work->demand.epochs % EXAMINED_EPOCHS != 0 || !filters_allow_all()) {
        return;
    }
    struct arena *arena = arena_next(arenas, &arenas->purger.examined_arena);
    if (arena == NULL) {
        arenas->purger.examined_arena = 0;
        arena = arena_next(arenas, &arenas->purger.examined_arena);
    }
    heap_lock(arena);
    struct runs *runs = &arena->heap.runs;
    uint32_t number = arena->examined_span;
    struct span *run = runs_some_clean(runs, &number);
    uint32_t skip = run == NULL || run->pages <= arena->examined_pages ? 0 : arena->examined_pages;
    uint32_t pages = run == NULL ? 0 : run->pages - skip;
    bool whole = pages <= RESIDENCY_CHUNK_PAGES;
    arena->examined_span = whole ? number : number - 1;
    arena->examined_pages = whole ? 0 : skip + RESIDENCY_CHUNK_PAGES;
    size_t offset = 0;
    size_t bytes = 0;
    if (run != NULL) {
        size_t examined = (whole ? pages : RESIDENCY_CHUNK_PAGES) * page_bytes(arenas);
        bytes =
            residency_first(run->base + skip * page_bytes(arenas), examined, arenas->work->scratch, &offset);
    }
    struct span *resident =
        bytes == 0 ? NULL
                   : runs_carve(runs, run, skip + offset / page_bytes(arenas), bytes / page_bytes(arenas));
    if (resident != NULL) {
        arena->heap.dirtied_pages += resident->pages;
        runs_put(runs, resident, false);
    }
    report_levels(arenas, arena);
    heap_unlock(arena);
}

/* Returns whether no thread has come to the heap for several epochs, and the
 * policy keeps no free memory. */
static bool is_given_up(const struct arenas *arenas) {
    const struct demand *demand = &arenas->work->demand;
    return arenas->epoch.untouched > 1 && demand_peak_pages(demand) <= demand->used_last;
}

/* Purges what is not worth keeping. The caller holds the purger's lock. */
static void purge_unused(struct arenas *arenas) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    bool given_up = is_given_up(arenas);
    size_t worth = demand_peak_pages(&arenas->work->demand) + demand_surplus_pages(&arenas->work->demand);
    struct levels totals = report_all(arenas);
    size_t dirty = totals.dirty;
    size_t keep = given_up ? 0 : size_minus(worth, totals.used);
    size_t tolerated = given_up ? 0 : max_prefaulted_pages(arenas, totals);
    bool may = may_purge(arenas, dirty);
    if (may && dirty >= keep + (given_up ? 1 : MIN_UNUSED_PAGES)) {
        purge_down(arenas, keep, tolerated, REASON_TIME);
    }
}

/* Ends the epoch that began at `start`. The caller holds the purger's lock. */
static void epoch_end(struct arenas *arenas, uint64_t now, uint64_t start) {
    arena_set_max(arenas, cpu_usage_sample(&arenas->epoch.cpu_usage));
    calm_assert(lock_is_mine(&arenas->purger.lock) && now >= start, now, start);
    struct demand_epoch epoch = read_epoch(arenas, (double)(now - start));
    size_t kept = size_minus(epoch.max_held, epoch.max_used) * page_bytes(arenas);
    arenas->epoch.family_share = family_share(&arenas->epoch.family, kept);
    if (arenas->counts.purged_pages > 0 && arenas->work->demand.epochs % MEASURED_EPOCHS == 0) {
        measure_fault_again(arenas);
    }
    struct demand_price price = {
        .fault_ns = arenas->counts.purged_pages > 0 ? fault_ns(arenas) : FAULT_NS,
        .page_seconds = memory_per_cpu_bytes(arenas) / (double)page_bytes(arenas),
    };
    struct demand_outcome outcome = demand_record(&arenas->work->demand, &epoch, price);
    struct demand_forecast forecast = demand_forecast(&arenas->work->demand);
    update_terms(arenas, REASON_TIME);
    add_count(&arenas->counts.wasted_ns, (uint64_t)outcome.wasted_ns);
    add_count(&arenas->counts.saved_ns, (uint64_t)outcome.saved_ns);
    arenas->epoch.outlook = (struct outlook){
        .memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(arenas),
        .break_even_ns = (uint64_t)(arenas->work->demand.break_even_s * 1e9),
        .waiting_bytes = forecast.pages * page_bytes(arenas),
        .waiting_unused_ns = (uint64_t)(forecast.unused_s * 1e9),
        .waiting_reuse_ns = (uint64_t)(forecast.reuse_s * 1e9),
        .waiting_until_ns = (uint64_t)(forecast.keep_s * 1e9),
    };
    examine_clean(arenas);
    if (is_adaptive(arenas)) {
        purge_unused(arenas);
    }
}

/* Returns whether nothing is left to purge. The caller holds the purger's
 * lock. */
static bool is_idle(struct arenas *arenas) {
    size_t dirty = report_all(arenas).dirty;
    bool may = may_purge(arenas, dirty);
    size_t cached;
    return arenas->epoch.untouched > 0 && (dirty == 0 || !may || !is_adaptive(arenas)) &&
           arena_cached(arenas, &cached) == 0;
}

bool epoch_advance(struct arenas *arenas, bool own_files) {
    uint64_t now = clock_coarse_ns();
    uint64_t start = atomic_load_explicit(&arenas->epoch.start_ns, memory_order_relaxed);
    if (clock_elapsed_ns(now, start) < DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        return false;
    }
    epoch_read_machine(arenas, own_files);
    now = clock_coarse_ns(); /* reading files may take long */
    if (!purger_try(arenas)) {
        return false;
    }
    /* Another thread may have ended the epoch in the meantime, even later than
     * `now`. */
    start = atomic_load_explicit(&arenas->epoch.start_ns, memory_order_relaxed);
    bool idle = false;
    if (clock_elapsed_ns(now, start) >= DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        flush_caches(arenas, false);
        epoch_end(arenas, now, start);
        idle = is_idle(arenas);
        purge_to_limit(arenas); /* reports without a check may have hidden that the limit is exceeded */
        if (idle || is_given_up(arenas)) {
            release_clean(arenas);
        }
        uint32_t quiet = atomic_load_explicit(&arenas->helper.quiet_epochs, memory_order_relaxed);
        atomic_store_explicit(&arenas->helper.quiet_epochs, idle ? quiet + 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&arenas->epoch.start_ns, now, memory_order_relaxed);
    }
    purger_leave(arenas);
    return idle;
}

bool epoch_keeps_little(struct arenas *arenas) {
    struct levels totals = sum_levels(arenas);
    return !is_over(arenas, totals.dirty, limit_if_background(arenas, totals, false).max);
}

bool epoch_is_untouched(struct arenas *arenas) {
    return count_checks(arenas) == atomic_load_explicit(&arenas->epoch.checks, memory_order_relaxed);
}
