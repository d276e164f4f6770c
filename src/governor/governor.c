#include "governor/governor.h"

#include "governor/helper.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/huge_pages.h"
#include "os/purge.h"
#include "policy/adaptive.h"
#include "policy/hysteresis.h"

/* A person can ask for so little slack that nothing is kept; a page for each of a few slabs stays all the
 * same. */
#define LIMIT_PAGES_LEAST 16
/* Under shortage the bound is this part of the policy's. */
#define SHORTAGE_FACTOR 0.125
/* The threshold's part that a purge leaves: the padding of "Ptlbmalloc2", section 6.2.1; under the adaptive
 * policy, which gives back later what nobody wants, more. */
#define KEEP_PAPER    0.25
#define KEEP_ADAPTIVE 0.75
/* The clock is read at one look in so many. */
#define LOOKS_PER_CLOCK 16
/* Caches whose blocks may keep alive more than this part of all pages are sparse. */
#define SPARSE_DIVISOR   4
#define SHORTAGE_READ_NS 1000000000ULL
#define RETRY_NS_LEAST   10000000ULL
#define RETRY_NS_MOST    60000000000ULL
#define FAULT_PAGES      32
/* What depots may hold for each CPU: of small blocks; of medium ones at first; and of these grown, but then
 * no more than this part of all pages. */
#define DEPOT_SMALL_PER_CPU  ((size_t)512 << 10)
#define DEPOT_MEDIUM_PER_CPU ((size_t)256 << 10)
#define DEPOT_GROWN_PER_CPU  ((size_t)4 << 20)
#define DEPOT_GROWN_DIVISOR  4
/* What a program uses before its slabs may lie in huge regions. */
#define HUGE_SLABS_BYTES_LEAST ((size_t)16 << 20)
/* Dearer to move than to copy below: see docs/experiments.md. */
#define MOVE_BYTES_LEAST ((size_t)256 << 10)

static size_t page_bytes(const struct governor *governor) {
    return governor->heap.space.page_size;
}

static double number(const _Atomic(int) *setting) {
    return atomic_load_explicit(setting, memory_order_relaxed);
}

static bool is_adaptive(const struct governor *governor) {
    return number(&governor->settings.policy) == POLICY_ADAPTIVE;
}

/* Under the heap's lock. */
static size_t limit_pages_by(const struct governor *governor, double factor) {
    const struct heap *heap = &governor->heap;
    size_t footprint = heap_used_pages(heap) + heap_dirty_pages(heap) + heap->purging_pages;
    size_t base = hysteresis_base_bytes(footprint << heap->space.page_shift);
    size_t pages = (size_t)((double)base * factor) >> heap->space.page_shift;
    return pages < LIMIT_PAGES_LEAST ? LIMIT_PAGES_LEAST : pages;
}

static double band_most(const struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_relaxed);
    return helper == HELPER_AWAKE || helper == HELPER_ASLEEP ? ADAPTIVE_BAND_MOST_TENDED : ADAPTIVE_BAND_MOST;
}

static size_t limit_pages(const struct governor *governor) {
    return limit_pages_by(governor, governor->factor);
}

/* The same, left where others may read it. */
static size_t publish_limit(struct governor *governor) {
    governor->limit_pages = limit_pages(governor);
    return governor->limit_pages;
}

/* Under the purger's lock. */
static double new_factor(struct governor *governor) {
    double cpus = governor->cpu_usage.cpus;
    double factor = (1 + cpus / 100) * number(&governor->settings.slack) / 100;
    if (is_adaptive(governor)) {
        factor *= governor->band;
        factor *= governor->memory_is_short ? SHORTAGE_FACTOR : 1;
    }
    return factor;
}

/* A heap with an owner is entered by the owner alone. */
static void heap_enter(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_acquire(&governor->heap_lock);
        governor->heap_locks++;
    }
}

static void heap_exit(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_release(&governor->heap_lock);
    }
}

/*
 * One purger at a time. The owner of a heap may come here while it purges, for whom it serves between two
 * slices: then the purge under way sees to what is over.
 */
static bool purger_try(struct governor *governor) {
    if (governor->owner == NULL) {
        return lock_try(&governor->purge_lock);
    }
    bool free = !governor->purging;
    governor->purging = true;
    return free;
}

static bool purger_enter(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_acquire(&governor->purge_lock);
        return true;
    }
    return purger_try(governor);
}

static void purger_leave(struct governor *governor) {
    if (governor->owner != NULL) {
        governor->purging = false;
    } else {
        lock_release(&governor->purge_lock);
    }
}

/* What the first touch of a page costs here: no table could say. */
static double measure_fault_ns(void) {
    size_t page = os_page_size();
    char *memory = os_reserve(FAULT_PAGES * page, page);
    if (memory == NULL || !os_commit(memory, FAULT_PAGES * page)) {
        return 1000;
    }
    uint64_t start = clock_now_ns();
    for (size_t i = 0; i < FAULT_PAGES; i++) {
        *(volatile char *)(memory + i * page) = 1;
    }
    uint64_t end = clock_now_ns();
    os_release(memory, FAULT_PAGES * page);
    return (double)(end - start) / FAULT_PAGES;
}

/* Measured when it is first wanted; by several threads, if they come at once. */
static double fault_ns(struct governor *governor) {
    double ns = atomic_load_explicit(&governor->fault_ns, memory_order_relaxed);
    if (ns == 0) {
        ns = measure_fault_ns();
        atomic_store_explicit(&governor->fault_ns, ns, memory_order_relaxed);
    }
    return ns;
}

enum reason { REASON_LIMIT, REASON_TIME, REASON_ASKED };

/* The kernel would not: do not ask again with every free, but not never either. */
static void back_off(struct governor *governor) {
    uint64_t after = governor->retry_after_ns * 2;
    governor->retry_after_ns = after < RETRY_NS_LEAST  ? RETRY_NS_LEAST
                               : after > RETRY_NS_MOST ? RETRY_NS_MOST
                                                       : after;
    governor->retry_ns = clock_now_ns() + governor->retry_after_ns;
    governor->retry_above_pages = heap_dirty_pages(&governor->heap) * 2;
}

enum slice { SLICE_PURGED, SLICE_EMPTY, SLICE_REFUSED };

/* Of one slice; where the kernel refuses more, it may as well refuse all. */
#define REFUSALS_MOST 16

/*
 * Purges a batch; what the kernel refuses is skipped, and lies behind the rest then. Returns how many ranges
 * were purged. Under the purger's lock.
 */
static size_t purge_batch(struct governor *governor, struct purge_batch *batch) {
    size_t done = 0;
    size_t end = batch->count;
    struct governor_counts counts = {0};
    uint64_t start = clock_now_ns();
    while (done < end && batch->count - end < REFUSALS_MOST) {
        struct purge_result result = purge_ranges(batch->ranges + done, end - done);
        done += result.ranges_done;
        counts.vectored_calls += result.vectored_calls;
        counts.single_calls += result.single_calls;
        if (done < end) {
            heap_enter(governor); /* whose owner may look a block up in the batch */
            purge_batch_swap(batch, done, --end);
            heap_exit(governor);
            counts.failures++;
        }
    }
    uint64_t spent = clock_now_ns() - start;
    governor->window_purge_ns += spent;
    heap_enter(governor);
    governor->counts.purge_ns += spent;
    governor->counts.ranges += done;
    governor->counts.vectored_calls += counts.vectored_calls;
    governor->counts.single_calls += counts.single_calls;
    governor->counts.failures += counts.failures;
    heap_exit(governor);
    return done;
}

/* Under the purger's lock. */
static enum slice purge_slice(struct governor *governor, size_t pages, enum purge_depth depth) {
    struct purge_batch *batch = &governor->batch;
    heap_enter(governor);
    heap_take_dirty(&governor->heap, batch, pages, depth);
    heap_exit(governor);
    if (batch->count == 0) {
        return SLICE_EMPTY;
    }
    size_t done = purge_batch(governor, batch);
    size_t purged = 0;
    for (size_t i = 0; i < done; i++) {
        purged += batch->ranges[i].iov_len >> governor->heap.space.page_shift;
    }
    governor->window_purged_pages += purged;
    heap_enter(governor);
    heap_put_back(&governor->heap, batch, done);
    governor->counts.purged_pages += purged;
    publish_limit(governor);
    if (done == 0) {
        back_off(governor);
    } else if (done == batch->count) {
        governor->retry_above_pages = 0;
        governor->retry_after_ns = 0;
    }
    heap_exit(governor);
    return done == 0 ? SLICE_REFUSED : SLICE_PURGED;
}

/* What describes nothing any more goes with what it described. Under the purger's lock, whose batch is free.
 */
static void purge_metadata(struct governor *governor) {
    struct iovec *ranges = governor->batch.ranges;
    heap_enter(governor);
    size_t count = space_take_idle(&governor->heap.space, ranges, PURGE_RANGES);
    heap_exit(governor);
    if (count == 0) {
        return;
    }
    struct purge_result result = purge_ranges(ranges, count);
    heap_enter(governor);
    space_put_idle(&governor->heap.space, ranges, count);
    governor->counts.ranges += result.ranges_done;
    governor->counts.vectored_calls += result.vectored_calls;
    governor->counts.single_calls += result.single_calls;
    heap_exit(governor);
}

/*
 * Gives back until at most keep pages stay. What costs more than it is worth, short ranges within slabs where
 * each range is a shootdown, and parts of huge pages, stays for as long as it is no more than bear pages.
 * Under the purger's lock.
 */
static bool purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason) {
    bool purged = false;
    enum purge_depth depth = purge_current_method() == PURGE_SINGLE ? PURGE_RUNS : PURGE_SLABS;
    /* No more than there is now: others may free as fast as this gives back. */
    size_t budget = SIZE_MAX;
    for (;;) {
        heap_enter(governor);
        size_t dirty = heap_dirty_pages(&governor->heap);
        heap_exit(governor);
        size_t excess = dirty > keep ? dirty - keep : 0;
        budget = budget < excess ? budget : excess;
        if (budget == 0) {
            break;
        }
        uint64_t before = governor->window_purged_pages;
        enum slice slice = purge_slice(governor, budget, depth);
        if (governor->owner != NULL) {
            governor->owner->between(governor->owner->context);
        }
        size_t given = governor->window_purged_pages - before;
        budget -= given < budget ? given : budget;
        purged |= slice == SLICE_PURGED;
        if (slice == SLICE_EMPTY && depth < PURGE_SPLIT && dirty > bear) {
            depth++;
        } else if (slice != SLICE_PURGED) {
            break;
        }
    }
    if (purged) {
        purge_metadata(governor);
        heap_enter(governor);
        governor->counts.purges += reason == REASON_LIMIT;
        governor->counts.purges_timed += reason == REASON_TIME;
        governor->counts.purges_asked += reason == REASON_ASKED;
        heap_exit(governor);
    }
    return purged;
}

/* A while after a refusal it may be tried again, however much there is. Under the heap's lock. */
static void forgive(struct governor *governor) {
    if (governor->retry_above_pages != 0 && clock_coarse_ns() > governor->retry_ns) {
        governor->retry_above_pages = 0;
    }
}

static bool may_retry(const struct governor *governor, size_t dirty) {
    return governor->retry_above_pages == 0 || dirty > governor->retry_above_pages;
}

/* Whether free memory exceeds the bound. Under the heap's lock. */
static bool is_over(struct governor *governor, size_t limit) {
    size_t dirty = heap_dirty_pages(&governor->heap);
    return dirty > limit && may_retry(governor, dirty);
}

/* What stays of the bound when it was exceeded. */
static size_t kept_pages(const struct governor *governor, size_t limit) {
    return (size_t)((double)limit * (is_adaptive(governor) ? KEEP_ADAPTIVE : KEEP_PAPER));
}

/*
 * Gives back until free memory is within the bound, which sinks with the footprint: so it looks again. Under
 * the purger's lock.
 */
static void purge_to_limit(struct governor *governor) {
    for (bool purged = true; purged;) {
        heap_enter(governor);
        size_t limit = limit_pages(governor);
        bool over = is_over(governor, limit);
        heap_exit(governor);
        purged = over && purge_down(governor, kept_pages(governor, limit), limit, REASON_LIMIT);
    }
}

/* A new bound for the same footprint: what exceeds it goes before it is published. Under the purger's lock.
 */
static void set_factor(struct governor *governor) {
    double factor = new_factor(governor);
    for (bool purged = true;;) {
        heap_enter(governor);
        size_t limit = limit_pages_by(governor, factor);
        if (!purged || !is_over(governor, limit)) {
            governor->factor = factor;
            publish_limit(governor);
            heap_exit(governor);
            return;
        }
        heap_exit(governor);
        purged = purge_down(governor, kept_pages(governor, limit), limit, REASON_LIMIT);
    }
}

/* What leaves a cache. Under the purger's lock. */
static void put_and_purge(void *context, void *const *blocks, size_t count) {
    struct governor *governor = context;
    heap_enter(governor);
    heap_put_blocks(&governor->heap, blocks, count);
    bool over = is_over(governor, limit_pages(governor));
    heap_exit(governor);
    if (over) {
        purge_to_limit(governor);
    }
}

/* What no thread wanted during the window leaves the depots, and after a few windows idle CPUs' caches. */
static void shed_caches(struct governor *governor, bool all) {
    for (unsigned i = 0; i < governor->caches->count && governor->caches->states != NULL; i++) {
        cpu_cache_drain(governor->caches, i, !all, put_and_purge, governor);
    }
    if (all && governor->owner != NULL) {
        governor->owner->shed(governor->owner->context);
    }
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_shed(&governor->depots[i], all, put_and_purge, governor);
    }
}

size_t governor_cached(const struct governor *governor, size_t *bytes) {
    size_t blocks = cpu_caches_blocks(governor->caches, bytes);
    const struct governor_owner *owner = governor->owner;
    if (owner != NULL) {
        size_t more;
        blocks += owner->cached(owner->context, &more);
        *bytes += more;
    }
    for (unsigned i = 0; i < governor->depot_count; i++) {
        size_t more;
        blocks += depot_blocks(&governor->depots[i], &more);
        *bytes += more;
    }
    return blocks;
}

/*
 * A program that frees most of what it had leaves the last of it in the caches, and each of those blocks may
 * keep a page: when that could be a good part of all there is, the caches are emptied. Under the purger's
 * lock, before a purge, which costs more.
 */
static void shed_if_sparse(struct governor *governor) {
    size_t bytes;
    size_t kept_pages = governor_cached(governor, &bytes);
    heap_enter(governor);
    size_t footprint = heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
    heap_exit(governor);
    if (kept_pages > footprint / SPARSE_DIVISOR) {
        shed_caches(governor, true);
    }
}

/* Free memory exceeds the bound: gives back, or waits for the thread that is at it. */
static void relieve(struct governor *governor) {
    if (!purger_enter(governor)) {
        return;
    }
    heap_enter(governor);
    forgive(governor);
    bool over = is_over(governor, limit_pages(governor));
    heap_exit(governor);
    if (over) {
        shed_if_sparse(governor);
        purge_to_limit(governor);
    }
    purger_leave(governor);
}

static void read_shortage(struct governor *governor, uint64_t now) {
    if (!number(&governor->settings.watch_cgroup)) {
        governor->memory_is_short = false;
    } else if (now - governor->shortage_read_ns >= SHORTAGE_READ_NS) {
        governor->shortage_read_ns = now;
        governor->memory_is_short = cgroup_memory_is_short();
    }
}

/* The window is over: what it tells about the next. Under the purger's lock. */
static void end_window(struct governor *governor, uint64_t now, uint64_t start) {
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
                                            .cost_share = number(&governor->settings.purge_time) / 100,
                                        });
    governor->window_purge_ns = 0;
    governor->window_purged_pages = 0;
    governor->window_reused_pages = reused;
    read_shortage(governor, now);
    governor->band = decision.band;
    set_factor(governor);
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

bool governor_tick(struct governor *governor) {
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
        end_window(governor, now, start);
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
        atomic_store_explicit(&governor->window_start_ns, now, memory_order_relaxed);
        if (governor->owner != NULL) {
            /* Whom it served between two slices relied on this. */
            purge_to_limit(governor);
        }
    }
    purger_leave(governor);
    return idle;
}

/* From now on there is a helper. */
static void tend(struct governor *governor) {
    lock_acquire(&governor->purge_lock);
    governor->band = ADAPTIVE_BAND_MOST_TENDED;
    set_factor(governor);
    purger_leave(governor);
}

size_t governor_take_misuse(struct governor *governor, struct misuse_note *notes) {
    size_t count = 0;
    heap_enter(governor);
    const struct heap *heap = &governor->heap;
    size_t number = governor->misuses_reported;
    if (heap->misuses - number > MISUSE_NOTES) {
        number = heap->misuses - MISUSE_NOTES;
    }
    while (number < heap->misuses) {
        notes[count++] = heap->misuse[number++ % MISUSE_NOTES];
    }
    governor->misuses_reported = number;
    heap_exit(governor);
    return count;
}

/* Without a lock, since what handles the abort may allocate. What the helper came upon is reported here, too;
 * what an owner did, by its clients, and what they did, when they have left it. */
static void report_misuse(struct governor *governor) {
    if (governor->has_clients) {
        atomic_store_explicit(&governor->misuse_waits, true, memory_order_release);
        return;
    }
    struct misuse_note notes[MISUSE_NOTES];
    size_t count = governor_take_misuse(governor, notes);
    for (size_t i = 0; i < count; i++) {
        governor->misused(notes[i].kind, notes[i].pointer);
    }
}

/* Out of the heap's door: looks whether too much is free, and whether a window is over. */
static void heap_leave(struct governor *governor) {
    size_t dirty = heap_dirty_pages(&governor->heap);
    if (dirty < governor->low_dirty_pages) {
        governor->low_dirty_pages = dirty;
    }
    bool clock = ++governor->looks % LOOKS_PER_CLOCK == 0;
    if (clock) {
        forgive(governor);
    }
    bool over = is_over(governor, publish_limit(governor));
    bool misused = governor->heap.misuses != governor->misuses_reported;
    heap_exit(governor);
    if (__builtin_expect(misused, 0)) {
        report_misuse(governor);
    }
    if (__builtin_expect(over, 0)) {
        relieve(governor);
    }
    if (governor->owner != NULL) {
        return; /* who looks at the clock by itself */
    }
    int helper = atomic_load_explicit(&governor->helper, memory_order_seq_cst);
    if (helper == HELPER_ASLEEP) {
        helper_wake(governor);
    }
    if (!clock) {
        return;
    }
    if (helper == HELPER_NONE && number(&governor->settings.background) != 0 &&
        thread_pointer() != governor->first_thread) {
        if (helper_start(governor)) {
            tend(governor);
        }
    }
    if (helper != HELPER_AWAKE) {
        governor_tick(governor);
    }
}

bool governor_init(struct governor *governor, const struct size_classes *classes, struct cpu_caches *caches,
                   size_t address_space, bool with_depots,
                   void (*misused)(enum misuse kind, const void *pointer)) {
    governor->caches = caches;
    governor->misused = misused;
    governor->first_thread = thread_pointer();
    /* Wide at first: what a start frees, it soon wants again. */
    governor->band = ADAPTIVE_BAND_MOST;
    if (!heap_init(&governor->heap, classes, address_space, NULL)) {
        return false;
    }
    /* Segments are too short to spend on alignment. */
    if (governor->heap.space.bytes > 0) {
        governor->heap.runs.huge_pages = huge_page_request_bytes() / page_bytes(governor);
    }
    unsigned nodes = caches->node != 0 ? nodes_possible() : 1;
    governor->depot_count = !with_depots ? 0 : nodes < DEPOTS_MOST ? nodes : DEPOTS_MOST;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        size_t cpus = cpu_affinity_count();
        depot_init(&governor->depots[i], classes, DEPOT_SMALL_PER_CPU * cpus / governor->depot_count,
                   DEPOT_MEDIUM_PER_CPU * cpus / governor->depot_count,
                   DEPOT_GROWN_PER_CPU * cpus / governor->depot_count);
    }
    cpu_usage_sample(&governor->cpu_usage);
    atomic_store_explicit(&governor->window_start_ns, clock_coarse_ns(), memory_order_relaxed);
    governor->factor = new_factor(governor);
    publish_limit(governor);
    return true;
}

/* The depot of the thread's node; NULL if there are none. */
static struct depot *near_depot(struct governor *governor) {
    if (governor->depot_count == 0) {
        return NULL;
    }
    unsigned node = cpu_cache_node();
    return &governor->depots[node < governor->depot_count ? node : 0];
}

/*
 * In the counter that goes with the thread: one for all would be a cache line that every CPU fetches for each
 * magazine. Threads that share one may lose a count.
 */
static void count_miss(struct governor *governor) {
    uint64_t mixed = (uint64_t)(uintptr_t)thread_pointer() * 0x9e3779b97f4a7c15ULL;
    _Atomic(uint64_t) *count = &governor->misses[mixed >> 32 & (MISS_COUNTERS - 1)].count;
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

uint64_t governor_misses(const struct governor *governor) {
    uint64_t misses = 0;
    for (unsigned i = 0; i < MISS_COUNTERS; i++) {
        misses += atomic_load_explicit(&governor->misses[i].count, memory_order_relaxed);
    }
    return misses;
}

size_t governor_take_blocks(struct governor *governor, uint32_t class, void **blocks, size_t count) {
    return governor_take_blocks_ready(governor, class, blocks, count, false);
}

static void make_ready(void *base, size_t bytes) {
    os_populate(base, bytes);
}

/*
 * An owner has slabs in huge regions too, once the program is of some size: the pages are touched here, off
 * its clients' way, and spare them misses of the TLB. Under the heap's lock.
 */
static enum run_choice choose_slab_run(const struct governor *governor) {
    size_t region = governor->heap.runs.huge_pages;
    bool dense = region != 0 && governor->settings.huge_pages != 0 &&
                 heap_used_pages(&governor->heap) * page_bytes(governor) >= HUGE_SLABS_BYTES_LEAST &&
                 !density_is_dear(&governor->density) &&
                 heap_dirty_pages(&governor->heap) + region <= limit_pages(governor) / 2;
    return dense ? RUN_FOR_DENSE : RUN_FOR_LARGE;
}

size_t governor_take_blocks_ready(struct governor *governor, uint32_t class, void **blocks, size_t count,
                                  bool ready) {
    count_miss(governor);
    struct depot *depot = near_depot(governor);
    size_t taken = depot == NULL ? 0 : depot_take(depot, class, blocks, count);
    if (taken == 0) {
        heap_enter(governor);
        governor->heap.make_ready = ready ? make_ready : NULL;
        governor->heap.slab_choice = governor->owner == NULL ? RUN_FOR_ANY
                                     : ready                 ? choose_slab_run(governor)
                                                             : RUN_FOR_LARGE;
        uint64_t made = governor->heap.runs.huge_pages_made;
        taken = heap_take_blocks(&governor->heap, class, blocks, count);
        if (governor->heap.runs.huge_pages_made != made && taken > 0) {
            uint64_t start = clock_thread_ns();
            *(volatile char *)blocks[0] = 0;
            density_note_cost(&governor->density, clock_thread_ns() - start,
                              (double)governor->heap.runs.huge_pages * fault_ns(governor));
        }
        heap_leave(governor);
    }
    return taken;
}

void governor_put_to_heap(void *context, void *const *blocks, size_t count) {
    struct governor *governor = context;
    heap_enter(governor);
    heap_put_blocks(&governor->heap, blocks, count);
    heap_leave(governor);
}

/* What the depots may grow to. Under the heap's lock. */
static size_t depot_wanted(const struct governor *governor) {
    size_t pages = heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
    return pages * page_bytes(governor) / DEPOT_GROWN_DIVISOR / governor->depot_count;
}

void governor_put_blocks(struct governor *governor, uint32_t class, void *const *blocks, size_t count) {
    count_miss(governor);
    struct depot *depot = near_depot(governor);
    if (depot != NULL && depot_put(depot, class, blocks, count)) {
        return;
    }
    heap_enter(governor);
    heap_put_blocks(&governor->heap, blocks, count);
    if (depot != NULL) {
        depot_grow(depot, class, depot_wanted(governor));
    }
    heap_leave(governor);
}

/*
 * In a huge region, if the program is one that touches its blocks, and the rest of the region, which is free
 * but will be resident, is well within the bound. Under the heap's lock.
 */
static enum run_choice choose_run(const struct governor *governor, size_t pages) {
    size_t region = governor->heap.runs.huge_pages;
    if (region == 0 || pages < DENSITY_PAGES_LEAST) {
        return RUN_FOR_ANY;
    }
    bool dense = governor->settings.huge_pages != 0 && density_is_high(&governor->density) &&
                 heap_dirty_pages(&governor->heap) + region <= limit_pages(governor) / 2;
    return dense ? RUN_FOR_DENSE : RUN_FOR_LARGE;
}

/*
 * An owner makes a new block resident before its client has it, if all large blocks are touched, so that the
 * client's first touch finds its pages there. Under the heap's lock; clean_pages are those before it was
 * taken.
 */
static bool is_to_be_ready(const struct governor *governor, void *block, bool zero, size_t clean_pages) {
    bool fresh = zero || governor->heap.runs.sets[RUN_CLEAN].pages < clean_pages;
    return fresh && density_expects_touch(&governor->density) &&
           !heap_large_span(&governor->heap, block)->huge;
}

void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool *zero) {
    return governor_take_large_ready(governor, pages, align_pages, zero, false);
}

void *governor_take_large_ready(struct governor *governor, size_t pages, size_t align_pages, bool *zero,
                                bool wants_ready) {
    heap_enter(governor);
    enum run_choice choice = choose_run(governor, pages);
    uint64_t made = governor->heap.runs.huge_pages_made;
    size_t clean_pages = governor->heap.runs.sets[RUN_CLEAN].pages;
    char *block = heap_take_large(&governor->heap, pages, align_pages, choice, zero);
    made = governor->heap.runs.huge_pages_made - made;
    bool ready = wants_ready && block != NULL && is_to_be_ready(governor, block, *zero, clean_pages);
    const char *base = NULL;
    size_t older_pages = 0;
    if (ready) {
        heap_large_span(&governor->heap, block)->ready = true;
    }
    if ((choice != RUN_FOR_ANY || governor->owner != NULL) && block != NULL) {
        const struct span *older = density_note(&governor->density, &governor->heap, block);
        base = older == NULL ? NULL : older->base;
        older_pages = older == NULL ? 0 : older->pages;
    }
    heap_leave(governor);
    if (made > 0 && block != NULL) {
        uint64_t start = clock_thread_ns();
        *(volatile char *)block = 0; /* the whole huge page comes with it */
        density_note_cost(&governor->density, clock_thread_ns() - start,
                          (double)governor->heap.runs.huge_pages * fault_ns(governor));
    }
    if (base != NULL) {
        density_judge(&governor->density, base, older_pages * page_bytes(governor), page_bytes(governor));
    }
    if (ready) {
        make_ready(block, pages * page_bytes(governor));
    }
    return block;
}

/*
 * A program that reads its zeroed memory before it writes, as a hash table's does, has the kernel's page of
 * zeros first, and each page that then is written is a copy of it: two faults, and a shootdown. So the whole
 * block is written at once, as by an allocator that cannot know it to be zero; but only where such blocks, of
 * which a program may never touch most, and free memory that is kept are together within the bound.
 */
void governor_populate(struct governor *governor, void *block, size_t pages) {
    if (number(&governor->settings.populate) == 0 ||
        atomic_load_explicit(&governor->cannot_populate, memory_order_relaxed)) {
        return;
    }
    heap_enter(governor);
    struct heap *heap = &governor->heap;
    bool within = heap_dirty_pages(heap) + heap->ahead_pages + pages <= limit_pages(governor);
    if (within) {
        heap_note_ahead(heap, block);
    }
    heap_exit(governor);
    if (within && !os_populate(block, pages * page_bytes(governor))) {
        atomic_store_explicit(&governor->cannot_populate, true, memory_order_relaxed);
    }
}

void governor_put_large(struct governor *governor, void *block) {
    struct span *renew = NULL;
    heap_enter(governor);
    if (heap_put_large(&governor->heap, block, &renew) == PUT_RENEW) {
        heap_exit(governor);
        bool renewed = os_renew(renew->base, (size_t)renew->pages * page_bytes(governor));
        heap_enter(governor);
        heap_put_renewed(&governor->heap, renew, renewed);
    }
    heap_leave(governor);
}

void *governor_resize_large(struct governor *governor, struct span *span, size_t pages) {
    size_t held = span->pages;
    heap_enter(governor);
    bool resized = heap_resize_large(&governor->heap, span, pages);
    bool may_move = !resized && pages > held && held * page_bytes(governor) >= MOVE_BYTES_LEAST &&
                    heap_may_move(&governor->heap);
    bool zero;
    char *to = may_move ? heap_take_large(&governor->heap, pages, 1, RUN_FOR_MOVE, &zero) : NULL;
    heap_leave(governor);
    if (resized || to == NULL) {
        return resized ? span->base : NULL;
    }
    size_t bytes = held * page_bytes(governor);
    if (!os_move_pages(span->base, to, bytes)) {
        /* Older kernels may have unmapped the place before they failed. Without it mapped anew, it is lost.
         */
        if (os_renew(to, bytes)) {
            governor_put_large(governor, to);
        }
        return NULL;
    }
    if (span->huge) {
        os_want_huge_pages(span->base,
                           bytes); /* what was moved away was asked for, and the place is still a region */
    }
    heap_enter(governor);
    heap_moved(&governor->heap, span, heap_large_span(&governor->heap, to));
    heap_leave(governor);
    return to;
}

size_t governor_trim(struct governor *governor, size_t keep_bytes) {
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
    heap_enter(governor);
    heap_leave(governor); /* which reports what came to light */
    return purged * page_bytes(governor);
}

bool governor_is_untouched(struct governor *governor) {
    heap_enter(governor);
    bool untouched = governor->looks == governor->window_looks;
    heap_exit(governor);
    return untouched;
}

bool governor_wants_helper(const struct governor *governor) {
    return number(&governor->settings.background) != 0;
}

size_t governor_limit(const struct governor *governor) {
    return limit_pages(governor) * page_bytes(governor);
}

void governor_refresh(struct governor *governor) {
    if (purger_enter(governor)) {
        set_factor(governor);
        purger_leave(governor);
        relieve(governor);
    }
}

void governor_lock(struct governor *governor) {
    heap_enter(governor);
}

void governor_unlock(struct governor *governor) {
    heap_exit(governor);
}

void governor_own(struct governor *governor, const struct governor_owner *owner) {
    governor->owner = owner;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        governor->depots[i].owned = true;
    }
    governor->has_clients = true;
    /* It looks at the clock, as the helper would. */
    if (atomic_exchange_explicit(&governor->helper, HELPER_AWAKE, memory_order_relaxed) != HELPER_AWAKE) {
        governor->band = ADAPTIVE_BAND_MOST_TENDED;
        governor->factor = new_factor(governor);
        publish_limit(governor);
    }
}

void governor_lend(struct governor *governor, enum lent lent) {
    static const int helpers[] = {
        [LENT_TENDED] = HELPER_AWAKE, [LENT_UNTENDED] = HELPER_REFUSED, [LENT_FOR_GOOD] = HELPER_NONE};
    governor->owner = NULL;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        governor->depots[i].owned = false;
    }
    governor->has_clients = lent != LENT_FOR_GOOD;
    atomic_store_explicit(&governor->helper, helpers[lent], memory_order_relaxed);
}

/* An owner is parked then, and needs no locks. */
static void lock_heap(struct governor *governor) {
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_lock_all(&governor->depots[i]);
    }
    heap_enter(governor);
}

static void unlock_heap(struct governor *governor) {
    for (unsigned i = governor->depot_count; i-- > 0;) {
        depot_unlock_all(&governor->depots[i]);
    }
    heap_exit(governor);
}

void governor_before_fork(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_acquire(&governor->purge_lock);
    }
    for (unsigned i = 0; i < governor->caches->count && governor->caches->states != NULL; i++) {
        lock_acquire(&governor->caches->states[i].lock);
    }
    if (governor->owner == NULL) {
        lock_heap(governor);
    }
}

/* In the child the locks may have been waited for by threads that are gone: a release would wake nobody, in
 * vain. */
void governor_after_fork(struct governor *governor, bool child) {
    for (unsigned i = governor->caches->count; governor->caches->states != NULL && i-- > 0;) {
        lock_release(&governor->caches->states[i].lock);
    }
    if (governor->owner != NULL) {
        return;
    }
    if (child && !governor->has_clients) {
        atomic_store_explicit(&governor->helper, HELPER_NONE, memory_order_relaxed);
        governor->first_thread = thread_pointer();
        governor->band = governor->band < ADAPTIVE_BAND_MOST ? governor->band : ADAPTIVE_BAND_MOST;
        governor->factor = new_factor(governor);
        publish_limit(governor);
    }
    unlock_heap(governor);
    lock_release(&governor->purge_lock);
}
