/*
 * The governor as a whole: its start, what a person asks of it, whose the heap is, and forks. How blocks are
 * handed out is in blocks.c and large.c, what is given back in purger.c, shed.c and window.c.
 */
#include "governor/governor.h"

#include "governor/bound.h"
#include "governor/heap_door.h"
#include "governor/helper.h"
#include "governor/purger.h"
#include "governor/shed.h"
#include "os/clock.h"
#include "os/cpus.h"
#include "os/huge_pages.h"
#include "os/seed.h"
#include "os/syscall.h"

/* What depots may hold for each CPU: of small blocks; of medium ones at first; and of these grown. */
#define DEPOT_SMALL_PER_CPU  ((size_t)512 << 10)
#define DEPOT_MEDIUM_PER_CPU ((size_t)256 << 10)
#define DEPOT_GROWN_PER_CPU  ((size_t)4 << 20)

bool governor_init(struct governor *governor, const struct size_classes *classes, struct cpu_caches *caches,
                   size_t address_space, bool with_depots,
                   void (*misused)(enum misuse kind, const void *pointer)) {
    governor->caches = caches;
    governor->misused = misused;
    governor->first_thread = thread_pointer();
    governor->process = (int)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0);
    cpu_mask_read(&governor->cpus);
    if (!heap_init(&governor->heap, classes, address_space, NULL)) {
        return false;
    }
    /* Segments are too short to spend on alignment. */
    if (governor->heap.space.quanta > 0) {
        governor->heap.runs.huge_pages = huge_page_request_bytes() / page_bytes(governor);
    }
    unsigned nodes = caches->node != 0 ? nodes_possible() : 1;
    size_t cpus = cpu_affinity_count();
    size_t each = cpus / nodes / DEPOT_CPUS;
    each = each * nodes > DEPOTS_MOST ? DEPOTS_MOST / nodes : each;
    governor->depots_per_node = each == 0 ? 1 : (unsigned)each;
    unsigned depots = nodes * governor->depots_per_node;
    governor->depot_count = !with_depots ? 0 : depots < DEPOTS_MOST ? depots : DEPOTS_MOST;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_init(&governor->depots[i], classes, DEPOT_SMALL_PER_CPU * cpus / governor->depot_count,
                   DEPOT_MEDIUM_PER_CPU * cpus / governor->depot_count,
                   DEPOT_GROWN_PER_CPU * cpus / governor->depot_count);
    }
    cpu_usage_sample(&governor->cpu_usage);
    atomic_store_explicit(&governor->window_start_ns, clock_coarse_ns(), memory_order_relaxed);
    atomic_store_explicit(&governor->room_bytes, SIZE_MAX, memory_order_relaxed);
    governor->terms = new_terms(governor);
    publish_limit(governor);
    return true;
}

size_t governor_trim_by_helper(struct governor *governor, size_t keep_bytes) {
    if (!purger_enter(governor)) {
        return 0;
    }
    shed_caches(governor, true);
    heap_enter(governor);
    uint64_t before = governor->counts.purged_pages;
    heap_exit(governor);
    purge_down(governor, keep_bytes / page_bytes(governor), 0, REASON_ASKED);
    heap_enter(governor);
    uint64_t purged = governor->counts.purged_pages - before;
    heap_exit(governor);
    purge_to_limit(governor);
    purger_leave(governor);
    return purged * page_bytes(governor);
}

size_t governor_trim(struct governor *governor, size_t keep_bytes) {
    size_t bytes = governor_trim_by_helper(governor, keep_bytes);
    heap_enter(governor);
    heap_leave(governor); /* which reports what came to light */
    return bytes;
}

bool governor_has_helper(const struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_acquire);
    return helper == HELPER_RUNS || !thread_is_gone(&governor->helper_thread);
}

bool governor_wants_helper(const struct governor *governor) {
    return setting_value(&governor->settings.background) != 0;
}

size_t governor_limit(const struct governor *governor) {
    return limit_pages(governor) * page_bytes(governor);
}

void governor_limit_space(struct governor *governor, size_t bytes) {
    heap_enter(governor);
    space_limit(&governor->heap.space, bytes);
    heap_exit(governor);
}

void governor_refresh(struct governor *governor) {
    if (purger_enter(governor)) {
        purger_set_terms(governor, REASON_LIMIT);
        purger_leave(governor);
        relieve(governor);
    }
}

void governor_end(struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_seq_cst);
    while (helper != HELPER_RUNS && helper != HELPER_ELSEWHERE) {
        if (atomic_compare_exchange_weak_explicit(&governor->helper, &helper, HELPER_ELSEWHERE,
                                                  memory_order_seq_cst, memory_order_relaxed)) {
            return;
        }
    }
}

/* What exceeds the new bound is given back by the next thread that comes to the heap. Under the heap's lock,
 * or while no thread is at the heap. */
static void set_tended(struct governor *governor, bool tended) {
    if (governor->tended != tended) {
        governor->tended = tended;
        governor->terms.tended = tended;
        publish_limit(governor);
    }
}

/* A higher bound needs no purger, which may be at work for long. */
void governor_tend(struct governor *governor) {
    heap_enter(governor);
    set_tended(governor, true);
    heap_exit(governor);
}

void governor_leave_untended(struct governor *governor) {
    if (!purger_enter(governor)) {
        return;
    }
    heap_enter(governor);
    governor->tended = false;
    heap_exit(governor);
    purger_set_terms(governor, REASON_LIMIT);
    purger_leave(governor);
}

void governor_own(struct governor *governor, const struct governor_owner *owner) {
    governor->owner = owner;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        governor->depots[i].owned = true;
    }
    governor->has_clients = true;
    /* It looks at the clock, as the helper would. */
    atomic_store_explicit(&governor->helper, HELPER_ELSEWHERE, memory_order_relaxed);
    set_tended(governor, true);
}

void governor_lend(struct governor *governor, enum lent lent) {
    static const int helpers[] = {
        [LENT_TENDED] = HELPER_ELSEWHERE, [LENT_UNTENDED] = HELPER_REFUSED, [LENT_FOR_GOOD] = HELPER_NONE};
    governor->owner = NULL;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        governor->depots[i].owned = false;
    }
    governor->has_clients = lent != LENT_FOR_GOOD;
    atomic_store_explicit(&governor->helper, helpers[lent], memory_order_relaxed);
    set_tended(governor, lent == LENT_TENDED);
}

bool governor_is_held(const struct governor *governor) {
    bool held = lock_is_mine(&governor->purge_lock) || lock_is_mine(&governor->heap_lock) ||
                cpu_caches_are_held(governor->caches);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        held |= depot_is_held(&governor->depots[i]);
    }
    return held;
}

void governor_shrink_for_fork(struct governor *governor) {
    if (governor_is_held(governor) || !purger_enter(governor)) {
        return;
    }
    heap_enter(governor);
    struct retention_terms terms = governor->terms;
    terms.tended = false;
    struct bound bound = bound_by(governor, &terms);
    bool over = is_over(governor, bound.limit) && !demand_is_spent(&governor->demand);
    heap_exit(governor);
    /* The budget is looked at once a window, so no more than once. */
    if (over && governor->shrunk_window != governor->demand.windows + 1) {
        governor->shrunk_window = governor->demand.windows + 1;
        purge_down(governor, bound.keep, bound.limit, REASON_LIMIT);
    }
    purger_leave(governor);
}

/*
 * An owner is parked then, and needs no locks. Otherwise the locks are acquired in their order, the heap's
 * last. A signal handler may fork whose thread holds some of them: then it waits only for those further in,
 * since a thread that holds one further out may wait for the handler's. What such a thread was purging is
 * lost to the child.
 */
void governor_before_fork(struct governor *governor) {
    bool waits = true;
    if (governor->owner == NULL) {
        waits = !lock_is_mine(&governor->heap_lock);
        for (unsigned i = 0; i < governor->depot_count; i++) {
            waits &= !depot_is_held(&governor->depots[i]);
        }
    }
    bool waits_for_depots = waits;
    waits &= !cpu_caches_are_held(governor->caches);
    /* An owner that could not be parked, since a debugger has stopped it, may be emptying a cache. */
    waits &= governor->owner == NULL || !atomic_load_explicit(&governor->purging, memory_order_relaxed);
    if (governor->owner == NULL) {
        lock_acquire_for_fork(&governor->purge_lock, waits);
    }
    cpu_caches_before_fork(governor->caches, waits);
    if (governor->owner == NULL) {
        for (unsigned i = 0; i < governor->depot_count; i++) {
            depot_before_fork(&governor->depots[i], waits_for_depots);
        }
        lock_acquire_for_fork(&governor->heap_lock, true);
    }
}

/* The child has no helper, and a first thread of its own. What is as it was is not written: a page that the
 * child does not write stays the parent's. Under the heap's lock, or alone. */
void governor_start_child(struct governor *governor) {
    if (governor->knows_caches) {
        governor->heap.colors.seed = os_process_seed();
    }
    if (governor->owner != NULL || governor->has_clients) {
        return;
    }
    helper_forget(governor);
    if (governor->first_thread != thread_pointer()) {
        governor->first_thread = thread_pointer();
    }
    set_tended(governor, false);
    /* What the parent had in use is not what the child will want; and a free page that it shares costs the
     * child as much to write to as one that was given back. */
    governor->demand.windows = 0;
    governor->max_used = heap_used_pages(&governor->heap);
    governor->max_held = governor->max_used + heap_dirty_pages(&governor->heap);
    governor->terms.peak_bytes = used_bytes(governor);
    governor->terms.held_bytes = 0;
    publish_limit(governor);
}

void governor_after_fork(struct governor *governor, bool child) {
    if (child) {
        governor_start_child(governor);
    }
    lock_release_after_fork(&governor->heap_lock);
    for (unsigned i = governor->depot_count; i-- > 0;) {
        depot_after_fork(&governor->depots[i], child);
    }
    cpu_caches_after_fork(governor->caches, child);
    lock_release_after_fork(&governor->purge_lock);
    if (child) {
        lock_reset_in_child(&governor->purge_lock);
    }
}
