/*
 * Windows: once one is over, what it showed of demand tells which free memory is worth keeping in the next,
 * and what lay unused for as long as that is given back.
 */
#include "governor/governor.h"

#include "governor/bound.h"
#include "governor/fault.h"
#include "governor/heap_lock.h"
#include "governor/helper.h"
#include "governor/purger.h"
#include "governor/shed.h"
#include "os/clock.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/memory_room.h"

#define ROOM_READ_NS 1000000000ULL
/* The coarse clock is so far behind at most, and a window of that much less is one. */
#define TICK_NS 10000000ULL
/* Less than this is not worth a system call each window. */
#define UNUSED_PAGES_LEAST 16
/* Taken for the cost of a page's fault until anything was given back: then it is measured. */
#define FAULT_NS 1000.0

static size_t footprint_pages(const struct governor *governor) {
    return heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
}

/* Holds no lock, since a file may be slow to read and a thread that allocates or forks would wait for the
 * lock. One thread reads files at a time: the helper, the server, or the only thread of a program without a
 * helper. */
static void read_room(struct governor *governor, uint64_t now, bool own_files) {
    /* A helper that shares the program's table opens nothing there, though the program has but one thread. */
    bool may_open = own_files || (file_may_open() && !governor_has_helper(governor));
    uint64_t read_ns = atomic_load_explicit(&governor->room_read_ns, memory_order_relaxed);
    size_t bytes = SIZE_MAX;
    if (setting_value(&governor->settings.watch_cgroup)) {
        if (!may_open || clock_elapsed_ns(now, read_ns) < ROOM_READ_NS) {
            return;
        }
        atomic_store_explicit(&governor->room_read_ns, now, memory_order_relaxed);
        heap_enter(governor);
        size_t held = footprint_pages(governor) * page_bytes(governor);
        heap_exit(governor);
        size_t room = memory_room_bytes();
        bytes = room < SIZE_MAX - held ? held + room : SIZE_MAX;
    }
    atomic_store_explicit(&governor->room_bytes, bytes, memory_order_relaxed);
}

void governor_read_room(struct governor *governor) {
    read_room(governor, clock_coarse_ns(), true);
}

/* Of all threads, in a window of so many ns. */
static double cpu_ns_used(struct governor *governor, double ns) {
    if (filters_now() == FILTERS_ADDED) {
        return governor->cpu_usage.cpus * ns; /* by system calls it is had */
    }
    uint64_t before = governor->window_cpu_ns;
    governor->window_cpu_ns = clock_read_ns(CLOCK_PROCESS_CPUTIME_ID);
    return governor->window_cpu_ns > before ? (double)(governor->window_cpu_ns - before) : 0;
}

/* What the window showed. The next one begins. Under the purger's lock. */
static struct demand_window read_window(struct governor *governor, double ns) {
    heap_enter(governor);
    forgive(governor);
    size_t faulted = governor->heap.runs.faulted_pages;
    struct demand_window window = {
        .ns = ns,
        .max_used = governor->max_used,
        .used_last = heap_used_pages(&governor->heap),
        .max_held = governor->max_held,
        .min_free = governor->min_free,
        .purged_pages = governor->window_purged_pages,
        .faulted_pages = faulted - governor->window_faulted_pages,
        .purge_ns = (double)governor->window_purge_ns,
    };
    governor->max_used = window.used_last;
    governor->max_held = footprint_pages(governor);
    governor->min_free = free_and_given_pages(governor);
    /* A heap that no thread came to keeps not even the little that is not worth a purge in each window. */
    bool untouched = governor->looks == governor->window_looks;
    governor->window_looks = governor->looks;
    heap_exit(governor);
    governor->untouched_windows = untouched ? governor->untouched_windows + 1 : 0;
    governor->window_faulted_pages = faulted;
    governor->window_purge_ns = 0;
    governor->window_purged_pages = 0;
    window.cpu_ns = cpu_ns_used(governor, ns);
    return window;
}

/* What lay unused through the period goes back. Under the purger's lock. */
static void purge_unused(struct governor *governor) {
    bool untouched = governor->untouched_windows >= demand_period(&governor->demand);
    heap_enter(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    size_t unused = demand_unused_pages(&governor->demand, dirty, governor->counts.purged_pages);
    size_t give = untouched ? dirty : unused;
    size_t bear = untouched ? 0 : max_ahead_pages(governor);
    bool may = may_retry(governor, dirty);
    heap_exit(governor);
    if (may && give >= (untouched ? 1 : UNUSED_PAGES_LEAST)) {
        purge_down(governor, dirty - give, bear, REASON_TIME);
    }
}

/* The window is over: what it tells about the next. Under the purger's lock. */
static void end_window(struct governor *governor, uint64_t now, uint64_t start) {
    cpu_usage_sample(&governor->cpu_usage);
    struct demand_window window = read_window(governor, (double)(now - start));
    struct demand_price price = {
        .fault_ns = governor->counts.purged_pages > 0 ? fault_ns(governor) : FAULT_NS,
        .share = setting_value(&governor->settings.purge_time) / 100,
    };
    double vain_ns = demand_note(&governor->demand, &window, price);
    purger_set_terms(governor, REASON_TIME);
    heap_enter(governor);
    governor->counts.vain_ns += (uint64_t)vain_ns;
    heap_exit(governor);
    if (is_adaptive(governor)) {
        purge_unused(governor);
    }
}

/* Whether there is nothing left to tidy. Under the purger's lock. */
static bool is_idle(struct governor *governor) {
    heap_enter(governor);
    size_t dirty = heap_dirty_pages(&governor->heap);
    bool may = may_retry(governor, dirty);
    heap_exit(governor);
    size_t cached;
    return governor->untouched_windows > 0 && (dirty == 0 || !may || !is_adaptive(governor)) &&
           governor_cached(governor, &cached) == 0;
}

bool governor_tick(struct governor *governor, bool own_files) {
    uint64_t now = clock_coarse_ns();
    uint64_t start = atomic_load_explicit(&governor->window_start_ns, memory_order_relaxed);
    if (clock_elapsed_ns(now, start) < WINDOW_NS - TICK_NS) {
        return false;
    }
    read_room(governor, now, own_files);
    now = clock_coarse_ns(); /* which may be much later */
    if (!purger_try(governor)) {
        return false;
    }
    /* Another thread may just have done it, even later than now. */
    start = atomic_load_explicit(&governor->window_start_ns, memory_order_relaxed);
    bool idle = false;
    if (clock_elapsed_ns(now, start) >= WINDOW_NS - TICK_NS) {
        shed_caches(governor, false);
        end_window(governor, now, start);
        idle = is_idle(governor);
        uint32_t quiet = atomic_load_explicit(&governor->quiet_windows, memory_order_relaxed);
        atomic_store_explicit(&governor->quiet_windows, idle ? quiet + 1 : 0, memory_order_relaxed);
        atomic_store_explicit(&governor->window_start_ns, now, memory_order_relaxed);
        if (governor->owner != NULL || governor->purger_may_stop) {
            /* Clients served between two slices relied on this, and threads that did not wait for it. */
            purge_to_limit(governor);
        }
    }
    purger_leave(governor);
    return idle;
}

bool governor_keeps_little(struct governor *governor) {
    heap_enter(governor);
    struct retention_terms terms = governor->terms;
    terms.tended = false;
    bool little = !is_over(governor, bound_by(governor, &terms).limit);
    heap_exit(governor);
    return little;
}

bool governor_is_untouched(struct governor *governor) {
    heap_enter(governor);
    bool untouched = governor->looks == governor->window_looks;
    heap_exit(governor);
    return untouched;
}
