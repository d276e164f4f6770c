#include "arena/epoch.h"

#include "arena/fault_cost.h"
#include "arena/flush.h"
#include "arena/limit.h"
#include "arena/purger.h"
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
void epoch_read_machine(struct arena *arena, bool own_files) {
    uint64_t now = clock_coarse_ns();
    /* A helper that shares the program's file table opens no file, even if the
     * program has only one thread. */
    bool may_open = own_files || (thread_may_open_files() && !arena_has_helper(arena));
    uint64_t read_ns = atomic_load_explicit(&arena->machine.read_ns, memory_order_relaxed);
    size_t bytes = SIZE_MAX;
    double scarcity_factor = 1;
    if (setting_value(&arena->settings.watch_cgroup)) {
        if (!may_open || clock_elapsed_ns(now, read_ns) < FOOTPRINT_READ_NS) {
            return;
        }
        atomic_store_explicit(&arena->machine.read_ns, now, memory_order_relaxed);
        heap_lock(arena);
        size_t held = footprint_pages(arena) * page_bytes(arena);
        heap_unlock(arena);
        size_t limit;
        size_t room = memory_available_bytes("", &limit);
        bytes = room < SIZE_MAX - held ? held + room : SIZE_MAX;
        scarcity_factor = room < limit / 2 ? 2 * (double)room / (double)limit : 1;
        arena->machine.cpu_quota =
            arena->machine.cpu_quota > 0 ? arena->machine.cpu_quota : cgroup_cpu_quota("");
        note_offer(arena, limit, arena->machine.cpu_quota);
    }
    calm_assert(scarcity_factor >= 0 && scarcity_factor <= 1);
    atomic_store_explicit(&arena->machine.scarcity_factor, scarcity_factor, memory_order_relaxed);
    atomic_store_explicit(&arena->machine.max_footprint, bytes, memory_order_relaxed);
}

/* Returns the CPU time of all threads in an epoch of `ns` nanoseconds. */
static double cpu_ns_used(struct arena *arena, double ns) {
    if (filters_now() == FILTERS_ADDED) { /* an added filter may forbid the system call */
        return arena->epoch.cpu_usage.cpus * ns;
    }
    uint64_t before = arena->epoch.cpu_ns;
    arena->epoch.cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    return arena->epoch.cpu_ns > before ? (double)(arena->epoch.cpu_ns - before) : 0;
}

/* Returns what the epoch showed, and begins the next one. The caller holds the
 * purger's lock. */
static struct demand_epoch read_epoch(struct arena *arena, double ns) {
    heap_lock(arena);
    end_backoff(arena);
    size_t faulted = arena->heap.runs.faulted_pages;
    calm_assert(faulted >= arena->epoch.faulted_pages, faulted, arena->epoch.faulted_pages);
    calm_assert(arena->limit.max_used >= heap_used_pages(&arena->heap), arena->limit.max_used);
    struct demand_epoch epoch = {
        .ns = ns,
        .max_used = arena->limit.max_used,
        .used_last = heap_used_pages(&arena->heap),
        .max_held = arena->limit.max_held,
        .purged_pages = arena->epoch.purged_pages,
        .faulted_pages = faulted - arena->epoch.faulted_pages,
        .purge_ns = (double)arena->epoch.purge_ns,
    };
    arena->limit.max_used = epoch.used_last;
    arena->limit.max_held = footprint_pages(arena);
    /* Pages that were free at both ends of the epoch count as free for all of
     * it. */
    size_t dirty = heap_dirty_pages(&arena->heap);
    double kept = (double)(size_min(arena->epoch.dirty_pages, dirty) * page_bytes(arena));
    arena->counts.kept_byte_seconds += (uint64_t)(kept * (ns / 1e9));
    arena->epoch.dirty_pages = dirty;
    /* If no thread came to the heap, all memory that is not worth keeping is
     * purged, even an amount that is too small for a purge in each epoch. */
    bool untouched = arena->limit.checks == arena->epoch.checks;
    arena->epoch.checks = arena->limit.checks;
    heap_unlock(arena);
    arena->epoch.untouched = untouched ? arena->epoch.untouched + 1 : 0;
    arena->epoch.faulted_pages = faulted;
    arena->epoch.purge_ns = 0;
    arena->epoch.purged_pages = 0;
    epoch.cpu_ns = cpu_ns_used(arena, ns);
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
static void examine_clean(struct arena *arena) {
    if (arena->epoch.demand.epochs % EXAMINED_EPOCHS != 0 || !filters_allow_all()) {
        return;
    }
    heap_lock(arena);
    struct runs *runs = &arena->heap.runs;
    uint32_t number = arena->purger.examined_span;
    struct span *run = runs_some_clean(runs, &number);
    uint32_t skip =
        run == NULL || run->pages <= arena->purger.examined_pages ? 0 : arena->purger.examined_pages;
    uint32_t pages = run == NULL ? 0 : run->pages - skip;
    bool whole = pages <= RESIDENCY_CHUNK_PAGES;
    arena->purger.examined_span = whole ? number : number - 1;
    arena->purger.examined_pages = whole ? 0 : skip + RESIDENCY_CHUNK_PAGES;
    size_t offset = 0;
    size_t bytes = 0;
    if (run != NULL) {
        size_t examined = (whole ? pages : RESIDENCY_CHUNK_PAGES) * page_bytes(arena);
        bytes =
            residency_first(run->base + skip * page_bytes(arena), examined, arena->purger.scratch, &offset);
    }
    struct span *resident =
        bytes == 0 ? NULL
                   : runs_carve(runs, run, skip + offset / page_bytes(arena), bytes / page_bytes(arena));
    if (resident != NULL) {
        arena->heap.dirtied_pages += resident->pages;
        runs_put(runs, resident, false);
    }
    heap_unlock(arena);
}

/* Returns whether no thread has come to the heap for several epochs, and the
 * policy keeps no free memory. */
static bool is_given_up(const struct arena *arena) {
    const struct demand *demand = &arena->epoch.demand;
    return arena->epoch.untouched > 1 && demand_peak_pages(demand) <= demand->used_last;
}

/* Purges what is not worth keeping. The caller holds the purger's lock. */
static void purge_unused(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->purger.lock));
    bool given_up = is_given_up(arena);
    size_t worth = demand_peak_pages(&arena->epoch.demand) + demand_surplus_pages(&arena->epoch.demand);
    heap_lock(arena);
    size_t dirty = heap_dirty_pages(&arena->heap);
    size_t keep = given_up ? 0 : size_minus(worth, heap_used_pages(&arena->heap));
    size_t tolerated = given_up ? 0 : max_prefaulted_pages(arena);
    bool may = may_purge(arena, dirty);
    heap_unlock(arena);
    if (may && dirty >= keep + (given_up ? 1 : MIN_UNUSED_PAGES)) {
        purge_down(arena, keep, tolerated, REASON_TIME);
    }
}

/* Ends the epoch that began at `start`. The caller holds the purger's lock. */
static void epoch_end(struct arena *arena, uint64_t now, uint64_t start) {
    cpu_usage_sample(&arena->epoch.cpu_usage);
    calm_assert(lock_is_mine(&arena->purger.lock) && now >= start, now, start);
    struct demand_epoch epoch = read_epoch(arena, (double)(now - start));
    size_t kept = size_minus(epoch.max_held, epoch.max_used) * page_bytes(arena);
    arena->epoch.family_share = family_share(&arena->epoch.family, kept);
    if (arena->counts.purged_pages > 0 && arena->epoch.demand.epochs % MEASURED_EPOCHS == 0) {
        measure_fault_again(arena);
    }
    struct demand_price price = {
        .fault_ns = arena->counts.purged_pages > 0 ? fault_ns(arena) : FAULT_NS,
        .page_seconds = memory_per_cpu_bytes(arena) / (double)page_bytes(arena),
    };
    struct demand_outcome outcome = demand_record(&arena->epoch.demand, &epoch, price);
    struct demand_forecast forecast = demand_forecast(&arena->epoch.demand);
    update_terms(arena, REASON_TIME);
    heap_lock(arena);
    arena->counts.wasted_ns += (uint64_t)outcome.wasted_ns;
    arena->counts.saved_ns += (uint64_t)outcome.saved_ns;
    arena->epoch.outlook = (struct outlook){
        .memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(arena),
        .break_even_ns = (uint64_t)(arena->epoch.demand.break_even_s * 1e9),
        .waiting_bytes = forecast.pages * page_bytes(arena),
        .waiting_unused_ns = (uint64_t)(forecast.unused_s * 1e9),
        .waiting_reuse_ns = (uint64_t)(forecast.reuse_s * 1e9),
        .waiting_until_ns = (uint64_t)(forecast.keep_s * 1e9),
    };
    heap_unlock(arena);
    examine_clean(arena);
    if (is_adaptive(arena)) {
        purge_unused(arena);
    }
}

/* Returns whether nothing is left to purge. The caller holds the purger's
 * lock. */
static bool is_idle(struct arena *arena) {
    heap_lock(arena);
    size_t dirty = heap_dirty_pages(&arena->heap);
    bool may = may_purge(arena, dirty);
    heap_unlock(arena);
    size_t cached;
    return arena->epoch.untouched > 0 && (dirty == 0 || !may || !is_adaptive(arena)) &&
           arena_cached(arena, &cached) == 0;
}

bool epoch_advance(struct arena *arena, bool own_files) {
    uint64_t now = clock_coarse_ns();
    uint64_t start = atomic_load_explicit(&arena->epoch.start_ns, memory_order_relaxed);
    if (clock_elapsed_ns(now, start) < DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        return false;
    }
    epoch_read_machine(arena, own_files);
    now = clock_coarse_ns(); /* reading files may take long */
    if (!purger_try(arena)) {
        return false;
    }
    /* Another thread may have ended the epoch in the meantime, even later than
     * `now`. */
    start = atomic_load_explicit(&arena->epoch.start_ns, memory_order_relaxed);
    bool idle = false;
    if (clock_elapsed_ns(now, start) >= DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        flush_caches(arena, false);
        epoch_end(arena, now, start);
        idle = is_idle(arena);
        if (idle || is_given_up(arena)) {
            release_clean(arena, true);
        }
        uint32_t quiet = atomic_load_explicit(&arena->helper.quiet_epochs, memory_order_relaxed);
        atomic_store_explicit(&arena->helper.quiet_epochs, idle ? quiet + 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&arena->epoch.start_ns, now, memory_order_relaxed);
    }
    purger_leave(arena);
    return idle;
}

bool epoch_keeps_little(struct arena *arena) {
    heap_lock(arena);
    bool little = !is_over(arena, limit_if_background(arena, false).max);
    heap_unlock(arena);
    return little;
}

bool epoch_is_untouched(struct arena *arena) {
    heap_lock(arena);
    bool untouched = arena->limit.checks == arena->epoch.checks;
    heap_unlock(arena);
    return untouched;
}
