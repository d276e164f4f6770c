#include "governor/governor.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/check.h"
#include "governor/flush.h"
#include "governor/helper.h"
#include "governor/limit.h"
#include "governor/purger.h"
#include "governor/terms.h"
#include "heap/marks.h"
#include "os/clock.h"
#include "os/cpus.h"
#include "os/memory.h"
#include "os/random.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/vm.h"

/* What depots may hold for each CPU: of small blocks; of medium ones at first; and of these grown. */
#define DEPOT_SMALL_PER_CPU  ((size_t)512 << 10)
#define DEPOT_MEDIUM_PER_CPU ((size_t)256 << 10)
#define DEPOT_GROWN_PER_CPU  ((size_t)4 << 20)
/* Where address space is limited, the depots' tables take at most one part in so many of it. */
#define DEPOT_LIMIT_SHARE 128

static size_t depot_bin_blocks(const struct governor *governor, const struct size_classes *classes) {
    if (!governor->heap.space.limited) {
        return DEPOT_BIN_BLOCKS;
    }
    size_t of_all = vm_limit_bytes() / DEPOT_LIMIT_SHARE / sizeof(void *) / classes->count;
    return size_min(of_all / size_max(governor->depot_count, 1), DEPOT_BIN_BLOCKS);
}

bool governor_init(struct governor *governor, const struct size_classes *classes, struct cpu_caches *caches,
                   size_t address_space, bool with_depots,
                   void (*misused)(const struct misuse_record *misuse)) {
    governor->caches = caches;
    governor->misused = misused;
    lock_set_rank(&governor->purge_lock, LOCK_PURGER);
    lock_set_rank(&governor->lock, LOCK_HEAP);
    governor->first_thread = thread_pointer();
    governor->process = (int)os_syscall(SYS_getpid);
    cpu_affinity(0, &governor->cpus);
    if (!heap_init(&governor->heap, classes, address_space)) {
        return false;
    }
    /* Segments are too short to spend on alignment. */
    if (governor->heap.space.quanta > 0) {
        governor->heap.runs.region_pages = huge_pages_request_bytes() / page_bytes(governor);
    }
    size_t cpus = size_max(cpu_set_count(&governor->cpus), 1);
    /* So few CPUs share one depot, even if they are on several nodes: these are not read from a file. */
    unsigned nodes = cpus > DEPOT_CPUS && caches->rseq.node != 0 ? nodes_possible() : 1;
    size_t each = size_min(cpus / nodes / DEPOT_CPUS, MAX_DEPOTS / nodes);
    governor->depots_per_node = with_depots ? (unsigned)size_max(each, 1) : 0;
    governor->depot_count = (unsigned)size_min((size_t)nodes * governor->depots_per_node, MAX_DEPOTS);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_init(&governor->depots[i], classes, depot_bin_blocks(governor, classes),
                   DEPOT_SMALL_PER_CPU * cpus / governor->depot_count,
                   DEPOT_MEDIUM_PER_CPU * cpus / governor->depot_count,
                   DEPOT_GROWN_PER_CPU * cpus / governor->depot_count);
    }
    cpu_usage_sample(&governor->cpu_usage);
    atomic_store_explicit(&governor->epoch_start_ns, clock_coarse_ns(), memory_order_relaxed);
    atomic_store_explicit(&governor->max_footprint, SIZE_MAX, memory_order_relaxed);
    atomic_store_explicit(&governor->scarcity_factor, 1, memory_order_relaxed);
    governor->family_share = 1;
    if (atomic_load_explicit(&governor->machine_gib_per_cpu, memory_order_relaxed) == 0) {
        note_offer(governor, memory_total_bytes(), (double)cpus);
    }
    governor->outlook.memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(governor);
    calm_assert(governor->depot_count <= MAX_DEPOTS && governor->depots_per_node <= MAX_DEPOTS,
                governor->depot_count);
    governor->terms = new_terms(governor);
    publish_limit(governor);
    return true;
}

size_t governor_trim_by_helper(struct governor *governor, size_t keep_bytes) {
    if (!purger_enter(governor)) {
        return 0;
    }
    flush_caches(governor, true);
    size_t purged = purge_down(governor, keep_bytes / page_bytes(governor), 0, REASON_ASKED);
    purge_to_limit(governor);
    release_clean(governor, true);
    purger_leave(governor);
    return purged * page_bytes(governor);
}

size_t governor_trim(struct governor *governor, size_t keep_bytes) {
    size_t bytes = governor_trim_by_helper(governor, keep_bytes);
    heap_lock(governor);
    heap_unlock_and_check(governor); /* reports misuse that came to light */
    return bytes;
}

static void copy_setting(_Atomic(int) *to, const _Atomic(int) *from) {
    atomic_store_explicit(to, setting_value(from), memory_order_relaxed);
}

void governor_copy_settings(struct governor *governor, const struct governor *from) {
    copy_setting(&governor->settings.policy, &from->settings.policy);
    copy_setting(&governor->settings.memory_per_cpu, &from->settings.memory_per_cpu);
    atomic_store_explicit(&governor->machine_gib_per_cpu,
                          atomic_load_explicit(&from->machine_gib_per_cpu, memory_order_relaxed),
                          memory_order_relaxed);
}

void governor_refresh(struct governor *governor) {
    if (purger_enter(governor)) {
        update_terms(governor, REASON_LIMIT);
        purger_leave(governor);
        enforce_limit(governor);
    }
}

void governor_set_mode(struct governor *governor, enum governor_mode mode) {
    static const int helpers[] = {[MODE_EXCLUSIVE] = HELPER_ELSEWHERE,
                                  [SHARED_BACKGROUND] = HELPER_ELSEWHERE,
                                  [SHARED_FOREGROUND] = HELPER_REFUSED,
                                  [SHARED_FOR_GOOD] = HELPER_NONE};
    governor->exclusive = mode == MODE_EXCLUSIVE;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        governor->depots[i].exclusive = governor->exclusive;
    }
    governor->has_clients = mode != SHARED_FOR_GOOD;
    atomic_store_explicit(&governor->helper, helpers[mode], memory_order_relaxed);
    set_background_purge(governor, helpers[mode] == HELPER_ELSEWHERE);
}

bool governor_is_held(const struct governor *governor) {
    bool held = lock_is_mine(&governor->purge_lock) || lock_is_mine(&governor->lock) ||
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
    heap_lock(governor);
    struct limit limit = limit_if_background(governor, false);
    bool over = is_over(governor, limit.max);
    heap_unlock(governor);
    /* Keeping the memory for the break-even time costs as much as this purge: so one in that time. */
    size_t pause = (size_t)(governor->demand.break_even_s * 1e9 / (double)DEMAND_EPOCH_NS);
    size_t epoch = 1 + governor->demand.epochs;
    if (over && (governor->fork_purge_epoch == 0 || epoch > governor->fork_purge_epoch + pause)) {
        governor->fork_purge_epoch = epoch;
        purge_down(governor, limit.keep, limit.max, REASON_LIMIT);
    }
    purger_leave(governor);
}

/*
 * The locks are acquired in their order, the heap's last. In exclusive mode they are free, and its thread is
 * parked. A signal handler may fork whose thread holds some of the locks: then it waits only for those
 * further in, since a thread that holds one further out may wait for the handler's. What such a thread was
 * purging is lost to the child.
 */
void governor_before_fork(struct governor *governor) {
    bool waits = !lock_is_mine(&governor->lock);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        waits &= !depot_is_held(&governor->depots[i]);
    }
    bool waits_for_depots = waits;
    waits &= !cpu_caches_are_held(governor->caches);
    /* A thread of exclusive mode that could not be parked, since a debugger has stopped it, may be purging,
     * and hold a CPU's cache meanwhile. */
    waits &= !governor->exclusive || !lock_is_held(&governor->purge_lock);
    lock_acquire_for_fork(&governor->purge_lock, waits);
    cpu_caches_before_fork(governor->caches, waits);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_before_fork(&governor->depots[i], waits_for_depots);
    }
    lock_acquire_for_fork(&governor->lock, true);
}

/* The child has no helper, and a first thread of its own. Words that keep their value are not written: a page
 * that the child does not write stays shared with its parent. Under the heap's lock, or alone. */
void governor_start_child(struct governor *governor) {
    marks_after_fork(&governor->heap);
    if (governor->has_colors) {
        governor->heap.colors.seed = random_process_seed();
    }
    if (governor->has_clients) {
        return;
    }
    helper_forget(governor);
    if (governor->first_thread != thread_pointer()) {
        governor->first_thread = thread_pointer();
    }
    set_background_purge(governor, false);
    /* What the parent used says little of what the child will use; and writing to a free page that it shares
     * costs the child as much as writing to a purged one. */
    demand_forget(&governor->demand);
    governor->outlook = (struct outlook){.memory_per_cpu_bytes = governor->outlook.memory_per_cpu_bytes};
    governor->max_used = heap_used_pages(&governor->heap);
    governor->max_held = governor->max_used + heap_dirty_pages(&governor->heap);
    governor->terms.peak_bytes = used_bytes(governor);
    governor->terms.surplus_bytes = 0;
    publish_limit(governor);
}

void governor_after_fork(struct governor *governor, bool child) {
    if (child && lock_reset_in_child(&governor->purge_lock)) {
        heap_lose_purge(&governor->heap);
    }
    if (child) {
        governor_start_child(governor);
    }
    lock_release_after_fork(&governor->lock);
    for (unsigned i = governor->depot_count; i-- > 0;) {
        depot_after_fork(&governor->depots[i], child);
    }
    cpu_caches_after_fork(governor->caches, child);
    lock_release_after_fork(&governor->purge_lock);
}
