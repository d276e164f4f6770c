#include "governor/epoch.h"

#include "base/assert.h"
#include "governor/fault_cost.h"
#include "governor/flush.h"
#include "governor/limit.h"
#include "governor/purger.h"
#include "governor/terms.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/memory.h"
#include "os/residency.h"

#define FOOTPRINT_READ_NS 1000000000ULL
/* The coarse clock is at most so far behind, and an epoch may be shorter by that. */
#define EPOCH_TICK_NS 10000000ULL
/* Less is not worth a system call in each epoch. */
#define MIN_UNUSED_PAGES 16
/* Clean memory is examined in one epoch of so many. */
#define EXAMINED_EPOCHS 4
/* And the cost of a fault is measured. */
#define MEASURED_EPOCHS 8
/* Assumed cost of a page fault until something was purged: then it is measured. */
#define FAULT_NS 1000.0

/* Holds no lock, since a file may be slow to read and threads that allocate or fork would wait for the lock.
 * One thread at a time reads files: the helper, the server, or the only thread of a program without a helper.
 */
void governor_read_max_footprint(struct governor *governor, bool own_files) {
    uint64_t now = clock_coarse_ns();
    /* A helper that shares the program's file table opens nothing, even where the program has only one
     * thread. */
    bool may_open = own_files || (thread_may_open_files() && !governor_has_helper(governor));
    uint64_t read_ns = atomic_load_explicit(&governor->max_footprint_read_ns, memory_order_relaxed);
    size_t bytes = SIZE_MAX;
    double scarcity_factor = 1;
    if (setting_value(&governor->settings.watch_cgroup)) {
        if (!may_open || clock_elapsed_ns(now, read_ns) < FOOTPRINT_READ_NS) {
            return;
        }
        atomic_store_explicit(&governor->max_footprint_read_ns, now, memory_order_relaxed);
        heap_lock(governor);
        size_t held = footprint_pages(governor) * page_bytes(governor);
        heap_unlock(governor);
        size_t limit;
        size_t room = memory_available_bytes("", &limit);
        bytes = room < SIZE_MAX - held ? held + room : SIZE_MAX;
        scarcity_factor = room < limit / 2 ? 2 * (double)room / (double)limit : 1;
        governor->cpu_quota = governor->cpu_quota > 0 ? governor->cpu_quota : cgroup_cpu_quota("");
        note_offer(governor, limit, governor->cpu_quota);
    }
    calm_assert(scarcity_factor >= 0 && scarcity_factor <= 1);
    atomic_store_explicit(&governor->scarcity_factor, scarcity_factor, memory_order_relaxed);
    atomic_store_explicit(&governor->max_footprint, bytes, memory_order_relaxed);
}

/* CPU time of all threads, in an epoch of so many ns. */
static double cpu_ns_used(struct governor *governor, double ns) {
    if (filters_now() == FILTERS_ADDED) { /* which may forbid the system call */
        return governor->cpu_usage.cpus * ns;
    }
    uint64_t before = governor->epoch_cpu_ns;
    governor->epoch_cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    return governor->epoch_cpu_ns > before ? (double)(governor->epoch_cpu_ns - before) : 0;
}

/* What the epoch showed; the next one begins. Under the purger's lock. */
static struct demand_epoch read_epoch(struct governor *governor, double ns) {
    heap_lock(governor);
    end_backoff(governor);
    size_t faulted = governor->heap.runs.faulted_pages;
    calm_assert(faulted >= governor->epoch_faulted_pages, faulted, governor->epoch_faulted_pages);
    calm_assert(governor->max_used >= heap_used_pages(&governor->heap) || governor->exclusive,
                governor->max_used);
    struct demand_epoch epoch = {
        .ns = ns,
        .max_used = governor->max_used,
        .used_last = heap_used_pages(&governor->heap),
        .max_held = governor->max_held,
        .purged_pages = governor->epoch_purged_pages,
        .faulted_pages = faulted - governor->epoch_faulted_pages,
        .purge_ns = (double)governor->epoch_purge_ns,
    };
    governor->max_used = epoch.used_last;
    governor->max_held = footprint_pages(governor);
    /* What was free at both ends was free in between. */
    size_t dirty = heap_dirty_pages(&governor->heap);
    double kept = (double)(size_min(governor->epoch_dirty_pages, dirty) * page_bytes(governor));
    governor->counts.kept_byte_seconds += (uint64_t)(kept * (ns / 1e9));
    governor->epoch_dirty_pages = dirty;
    /* A heap that no thread came to keeps nothing, not even what is not worth a purge in each epoch. */
    bool untouched = governor->checks == governor->epoch_checks;
    governor->epoch_checks = governor->checks;
    heap_unlock(governor);
    governor->untouched_epochs = untouched ? governor->untouched_epochs + 1 : 0;
    governor->epoch_faulted_pages = faulted;
    governor->epoch_purge_ns = 0;
    governor->epoch_purged_pages = 0;
    epoch.cpu_ns = cpu_ns_used(governor, ns);
    return epoch;
}

/*
 * Clean memory holds none, unless something made it resident that the allocator does not see, such as huge
 * pages that a program requested by a system call of its own. So some of it is examined now and then; what is
 * resident counts as dirty, and is purged again. Under the purger's lock.
 */
static void examine_clean(struct governor *governor) {
    if (governor->demand.epochs % EXAMINED_EPOCHS != 0 || !filters_allow_all()) {
        return;
    }
    heap_lock(governor);
    struct runs *runs = &governor->heap.runs;
    uint32_t number = governor->examined_span;
    struct span *run = runs_some_clean(runs, &number);
    uint32_t skip = run == NULL || run->pages <= governor->examined_pages ? 0 : governor->examined_pages;
    uint32_t pages = run == NULL ? 0 : run->pages - skip;
    bool whole = pages <= RESIDENCY_CHUNK_PAGES;
    governor->examined_span = whole ? number : number - 1;
    governor->examined_pages = whole ? 0 : skip + RESIDENCY_CHUNK_PAGES;
    size_t offset = 0;
    size_t bytes = 0;
    if (run != NULL) {
        size_t examined = (whole ? pages : RESIDENCY_CHUNK_PAGES) * page_bytes(governor);
        bytes =
            residency_first(run->base + skip * page_bytes(governor), examined, governor->scratch, &offset);
    }
    struct span *resident = bytes == 0 ? NULL
                                       : runs_carve(runs, run, skip + offset / page_bytes(governor),
                                                    bytes / page_bytes(governor));
    if (resident != NULL) {
        governor->heap.dirtied_pages += resident->pages;
        runs_put(runs, resident, false);
    }
    heap_unlock(governor);
}

/* Whether the heap lies untouched, and no free memory is worth keeping. */
static bool is_given_up(const struct governor *governor) {
    const struct demand *demand = &governor->demand;
    return governor->untouched_epochs > 1 && demand_peak_pages(demand) <= demand->used_last;
}

/* Purges what is not worth keeping. Under the purger's lock. */
static void purge_unused(struct governor *governor) {
    calm_assert(lock_is_mine(&governor->purge_lock));
    bool given_up = is_given_up(governor);
    size_t worth = demand_peak_pages(&governor->demand) + demand_surplus_pages(&governor->demand);
    heap_lock(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    size_t keep = given_up ? 0 : size_minus(worth, heap_used_pages(&governor->heap));
    size_t bear = given_up ? 0 : max_prefaulted_pages(governor);
    bool may = may_purge(governor, dirty);
    heap_unlock(governor);
    if (may && dirty >= keep + (given_up ? 1 : MIN_UNUSED_PAGES)) {
        purge_down(governor, keep, bear, REASON_TIME);
    }
}

/* Under the purger's lock. */
static void epoch_end(struct governor *governor, uint64_t now, uint64_t start) {
    cpu_usage_sample(&governor->cpu_usage);
    calm_assert(lock_is_mine(&governor->purge_lock) && now >= start, now, start);
    struct demand_epoch epoch = read_epoch(governor, (double)(now - start));
    size_t kept = size_minus(epoch.max_held, epoch.max_used) * page_bytes(governor);
    governor->family_share = family_share(&governor->family, kept);
    if (governor->counts.purged_pages > 0 && governor->demand.epochs % MEASURED_EPOCHS == 0) {
        measure_fault_again(governor);
    }
    struct demand_price price = {
        .fault_ns = governor->counts.purged_pages > 0 ? fault_ns(governor) : FAULT_NS,
        .page_seconds = memory_per_cpu_bytes(governor) / (double)page_bytes(governor),
    };
    struct demand_outcome outcome = demand_record(&governor->demand, &epoch, price);
    struct demand_forecast forecast = demand_forecast(&governor->demand);
    update_terms(governor, REASON_TIME);
    heap_lock(governor);
    governor->counts.wasted_ns += (uint64_t)outcome.wasted_ns;
    governor->counts.saved_ns += (uint64_t)outcome.saved_ns;
    governor->outlook = (struct outlook){
        .memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(governor),
        .break_even_ns = (uint64_t)(governor->demand.break_even_s * 1e9),
        .waiting_bytes = forecast.pages * page_bytes(governor),
        .waiting_unused_ns = (uint64_t)(forecast.unused_s * 1e9),
        .waiting_reuse_ns = (uint64_t)(forecast.reuse_s * 1e9),
        .waiting_until_ns = (uint64_t)(forecast.keep_s * 1e9),
    };
    heap_unlock(governor);
    examine_clean(governor);
    if (is_adaptive(governor)) {
        purge_unused(governor);
    }
}

/* Whether nothing is left to purge. Under the purger's lock. */
static bool is_idle(struct governor *governor) {
    heap_lock(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    bool may = may_purge(governor, dirty);
    heap_unlock(governor);
    size_t cached;
    return governor->untouched_epochs > 0 && (dirty == 0 || !may || !is_adaptive(governor)) &&
           governor_cached(governor, &cached) == 0;
}

bool governor_tick(struct governor *governor, bool own_files) {
    uint64_t now = clock_coarse_ns();
    uint64_t start = atomic_load_explicit(&governor->epoch_start_ns, memory_order_relaxed);
    if (clock_elapsed_ns(now, start) < DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        return false;
    }
    governor_read_max_footprint(governor, own_files);
    now = clock_coarse_ns(); /* reading files may take long */
    if (!purger_try(governor)) {
        return false;
    }
    /* Another thread may just have ended the epoch, even later than now. */
    start = atomic_load_explicit(&governor->epoch_start_ns, memory_order_relaxed);
    bool idle = false;
    if (clock_elapsed_ns(now, start) >= DEMAND_EPOCH_NS - EPOCH_TICK_NS) {
        flush_caches(governor, false);
        epoch_end(governor, now, start);
        idle = is_idle(governor);
        if (idle || is_given_up(governor)) {
            release_clean(governor, true);
        }
        uint32_t quiet = atomic_load_explicit(&governor->quiet_epochs, memory_order_relaxed);
        atomic_store_explicit(&governor->quiet_epochs, idle ? quiet + 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&governor->epoch_start_ns, now, memory_order_relaxed);
        if (!purger_may_wait(governor)) {
            /* Threads that found this purge under way left it what exceeds the limit. */
            purge_to_limit(governor);
        }
    }
    purger_leave(governor);
    return idle;
}

bool governor_keeps_little(struct governor *governor) {
    heap_lock(governor);
    bool little = !is_over(governor, limit_if_background(governor, false).max);
    heap_unlock(governor);
    return little;
}

bool governor_is_untouched(struct governor *governor) {
    heap_lock(governor);
    bool untouched = governor->checks == governor->epoch_checks;
    heap_unlock(governor);
    return untouched;
}
