/*
 * Windows: once one is over, what lay unused during it is shed, and what it tells about the next widens the
 * bound or narrows it.
 */
#include "governor/governor.h"

#include "governor/bound.h"
#include "governor/fault.h"
#include "governor/heap_lock.h"
#include "governor/helper.h"
#include "governor/purger.h"
#include "governor/shed.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/file.h"
#include "policy/adaptive.h"

#define SHORTAGE_READ_NS 1000000000ULL

static double band_most(const struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_relaxed);
    return helper == HELPER_RUNS || helper == HELPER_ELSEWHERE ? ADAPTIVE_BAND_MOST_TENDED
                                                               : ADAPTIVE_BAND_MOST;
}

static void read_shortage(struct governor *governor, uint64_t now, bool own_files) {
    if ((!own_files && !file_may_open()) || !setting_value(&governor->settings.watch_cgroup)) {
        governor->memory_is_short = false;
    } else if (now - governor->shortage_read_ns >= SHORTAGE_READ_NS) {
        governor->shortage_read_ns = now;
        governor->memory_is_short = cgroup_memory_is_short();
    }
}

/* The window is over: what it tells about the next. Under the purger's lock. */
static void end_window(struct governor *governor, uint64_t now, uint64_t start, bool own_files) {
    double cpus = cpu_usage_sample(&governor->cpu_usage);
    heap_enter(governor);
    forgive(governor);
    size_t unused = governor->low_dirty_pages;
    size_t reused = governor->heap.runs.reused_pages;
    heap_exit(governor);

    bool wanted = reused > governor->window_reused_pages || governor->window_purged_pages > 0;
    struct adaptive_decision decision =
        adaptive_decide(governor->band, (struct adaptive_window){
                                            .ns = (double)(now - start),
                                            .cpus_used = cpus,
                                            .purge_ns = (double)governor->window_purge_ns,
                                            .fault_ns = wanted ? fault_ns(governor) : 0,
                                            .purged_pages = governor->window_purged_pages,
                                            .reused_pages = reused - governor->window_reused_pages,
                                            .unused_pages = unused,
                                            .band_most = band_most(governor),
                                            .cost_share = setting_value(&governor->settings.purge_time) / 100,
                                        });
    governor->window_purge_ns = 0;
    governor->window_purged_pages = 0;
    governor->window_reused_pages = reused;
    read_shortage(governor, now, own_files);
    governor->band = decision.band;
    purger_set_factor(governor);
    if (!is_adaptive(governor)) {
        return;
    }
    heap_enter(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    bool may = may_retry(governor, dirty);
    size_t bear = limit_pages(governor);
    heap_exit(governor);
    size_t give = governor->memory_is_short      ? dirty
                  : decision.purge_pages < dirty ? decision.purge_pages
                                                 : dirty;
    if (give > 0 && may) {
        purge_down(governor, dirty - give, governor->memory_is_short ? 0 : bear, REASON_TIME);
    }
}

bool governor_tick(struct governor *governor, bool own_files) {
    uint64_t now = clock_coarse_ns();
    uint64_t start = atomic_load_explicit(&governor->window_start_ns, memory_order_relaxed);
    if (now - start < WINDOW_NS || !purger_try(governor)) {
        return false;
    }
    /* Another thread may just have done it. */
    start = atomic_load_explicit(&governor->window_start_ns, memory_order_relaxed);
    bool idle = false;
    if (now - start >= WINDOW_NS) {
        shed_caches(governor, false);
        end_window(governor, now, start, own_files);
        heap_enter(governor);
        size_t dirty = heap_dirty_pages(&governor->heap);
        governor->low_dirty_pages = dirty;
        /* A heap that nobody came to keeps not even the little that is not worth a purge in each window. */
        bool untouched = governor->looks == governor->window_looks;
        governor->window_looks = governor->looks;
        bool may = may_retry(governor, dirty);
        heap_exit(governor);
        if (untouched && dirty > 0 && may && is_adaptive(governor)) {
            purge_down(governor, 0, 0, REASON_TIME);
        }
        size_t cached;
        idle = untouched && (dirty == 0 || !may || !is_adaptive(governor)) &&
               governor_cached(governor, &cached) == 0;
        uint32_t quiet = atomic_load_explicit(&governor->quiet_windows, memory_order_relaxed);
        atomic_store_explicit(&governor->quiet_windows, idle ? quiet + 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&governor->window_start_ns, now, memory_order_relaxed);
        if (governor->owner != NULL) {
            /* Whom it served between two slices relied on this. */
            purge_to_limit(governor);
        }
    }
    purger_leave(governor);
    return idle;
}

bool governor_is_untouched(struct governor *governor) {
    heap_enter(governor);
    bool untouched = governor->looks == governor->window_looks;
    heap_exit(governor);
    return untouched;
}
