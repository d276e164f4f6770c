#include "arena/arena.h"

#include "arena/check.h"
#include "arena/flush.h"
#include "arena/helper.h"
#include "arena/limit.h"
#include "arena/purger.h"
#include "arena/terms.h"
#include "base/assert.h"
#include "base/size.h"
#include "heap/marks.h"
#include "os/clock.h"
#include "os/cpus.h"
#include "os/memory.h"
#include "os/random.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/vm.h"

/* The bytes that the depots may hold for each CPU: small blocks; medium blocks
 * at first; medium blocks after the bins have grown. */
#define DEPOT_SMALL_PER_CPU  ((size_t)512 << 10)
#define DEPOT_MEDIUM_PER_CPU ((size_t)256 << 10)
#define DEPOT_GROWN_PER_CPU  ((size_t)4 << 20)
/* Under a limit on address space, the depots' tables take at most
 * 1/DEPOT_LIMIT_SHARE of it. */
#define DEPOT_LIMIT_SHARE 128

static size_t depot_bin_blocks(const struct arena *arena, const struct size_classes *classes) {
    if (!arena->heap.space.limited) {
        return DEPOT_BIN_BLOCKS;
    }
    size_t of_all = vm_limit_bytes() / DEPOT_LIMIT_SHARE / sizeof(void *) / classes->count;
    return size_min(of_all / size_max(arena->depot_count, 1), DEPOT_BIN_BLOCKS);
}

bool arena_init(struct arena *arena, const struct size_classes *classes, struct cpu_caches *caches,
                size_t address_space, bool with_depots, void (*misused)(const struct misuse_record *misuse)) {
    arena->caches = caches;
    arena->misused = misused;
    lock_set_rank(&arena->purger.lock, LOCK_PURGER);
    lock_set_rank(&arena->lock, LOCK_HEAP);
    arena->helper.first_thread = thread_pointer();
    arena->helper.process = (int)os_syscall(SYS_getpid);
    cpu_affinity(0, &arena->helper.cpus);
    if (!heap_init(&arena->heap, classes, address_space)) {
        return false;
    }
    /* Segments are too short for huge-page regions, which are aligned. */
    if (arena->heap.space.quanta > 0) {
        arena->heap.runs.region_pages = huge_pages_request_bytes() / page_bytes(arena);
    }
    size_t cpus = size_max(cpu_set_count(&arena->helper.cpus), 1);
    /* At most DEPOT_CPUS CPUs share one depot even if they are on several
     * nodes. The number of nodes is then not read from a file. */
    unsigned nodes = cpus > DEPOT_CPUS && caches->rseq.node != 0 ? nodes_possible() : 1;
    size_t each = size_min(cpus / nodes / DEPOT_CPUS, MAX_DEPOTS / nodes);
    arena->depots_per_node = with_depots ? (unsigned)size_max(each, 1) : 0;
    arena->depot_count = (unsigned)size_min((size_t)nodes * arena->depots_per_node, MAX_DEPOTS);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        depot_init(&arena->depots[i], classes, depot_bin_blocks(arena, classes),
                   DEPOT_SMALL_PER_CPU * cpus / arena->depot_count,
                   DEPOT_MEDIUM_PER_CPU * cpus / arena->depot_count,
                   DEPOT_GROWN_PER_CPU * cpus / arena->depot_count);
    }
    cpu_usage_sample(&arena->epoch.cpu_usage);
    atomic_store_explicit(&arena->epoch.start_ns, clock_coarse_ns(), memory_order_relaxed);
    atomic_store_explicit(&arena->machine.max_footprint, SIZE_MAX, memory_order_relaxed);
    atomic_store_explicit(&arena->machine.scarcity_factor, 1, memory_order_relaxed);
    arena->epoch.family_share = 1;
    if (atomic_load_explicit(&arena->machine.gib_per_cpu, memory_order_relaxed) == 0) {
        note_offer(arena, memory_total_bytes(), (double)cpus);
    }
    arena->epoch.outlook.memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(arena);
    calm_assert(arena->depot_count <= MAX_DEPOTS && arena->depots_per_node <= MAX_DEPOTS, arena->depot_count);
    arena->limit.terms = new_terms(arena);
    publish_limit(arena);
    return true;
}

size_t arena_trim_by_helper(struct arena *arena, size_t keep_bytes) {
    purger_enter(arena);
    flush_caches(arena, true);
    size_t purged = purge_down(arena, keep_bytes / page_bytes(arena), 0, REASON_ASKED);
    purge_to_limit(arena);
    release_clean(arena, true);
    purger_leave(arena);
    return purged * page_bytes(arena);
}

size_t arena_trim(struct arena *arena, size_t keep_bytes) {
    size_t bytes = arena_trim_by_helper(arena, keep_bytes);
    heap_lock(arena);
    heap_unlock_and_check(arena); /* reports invalid frees that came to light */
    return bytes;
}

void arena_refresh(struct arena *arena) {
    purger_enter(arena);
    update_terms(arena, REASON_LIMIT);
    purger_leave(arena);
    enforce_limit(arena);
}

bool arena_is_held(const struct arena *arena) {
    bool held =
        lock_is_mine(&arena->purger.lock) || lock_is_mine(&arena->lock) || cpu_caches_are_held(arena->caches);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        held |= depot_is_held(&arena->depots[i]);
    }
    return held;
}

void arena_shrink_for_fork(struct arena *arena) {
    if (arena_is_held(arena)) {
        return;
    }
    purger_enter(arena);
    heap_lock(arena);
    struct limit limit = limit_if_background(arena, false);
    bool over = is_over(arena, limit.max);
    heap_unlock(arena);
    /* Keeping the memory for the break-even time costs as much as this purge.
     * Forks therefore purge at most once in that time. */
    size_t pause = (size_t)(arena->epoch.demand.break_even_s * 1e9 / (double)DEMAND_EPOCH_NS);
    size_t epoch = 1 + arena->epoch.demand.epochs;
    if (over && (arena->purger.fork_epoch == 0 || epoch > arena->purger.fork_epoch + pause)) {
        arena->purger.fork_epoch = epoch;
        purge_down(arena, limit.keep, limit.max, REASON_LIMIT);
    }
    purger_leave(arena);
}

/*
 * Acquires the locks in the order of their ranks, the heap's last.
 *
 * A signal handler may fork while the thread that it interrupted holds some of
 * the locks. The fork then waits only for locks of later ranks. It does not
 * wait for a lock of an earlier rank, since the holder of that lock may itself
 * wait for a lock of the interrupted thread. If another thread is purging at
 * the time of the fork, the child loses that thread's batch.
 */
void arena_before_fork(struct arena *arena) {
    bool waits = !lock_is_mine(&arena->lock);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        waits &= !depot_is_held(&arena->depots[i]);
    }
    bool waits_for_depots = waits;
    waits &= !cpu_caches_are_held(arena->caches);
    lock_acquire_for_fork(&arena->purger.lock, waits);
    cpu_caches_before_fork(arena->caches, waits);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        depot_before_fork(&arena->depots[i], waits_for_depots);
    }
    lock_acquire_for_fork(&arena->lock, true);
}

/* The child has no helper, and its first thread is the one that forked. A word
 * that keeps its value is not written, because a page that the child does not
 * write stays shared with its parent. The caller holds the heap's lock, or the
 * process is single-threaded. */
void arena_start_child(struct arena *arena) {
    marks_after_fork(&arena->heap);
    if (arena->has_colors) {
        arena->heap.colors.seed = random_process_seed();
    }
    helper_forget(arena);
    if (arena->helper.first_thread != thread_pointer()) {
        arena->helper.first_thread = thread_pointer();
    }
    set_background_purge(arena, false);
    /* The parent's demand says little about the child's. A write to a free page
     * that the child shares with its parent costs as much as a write to a
     * purged page. */
    demand_forget(&arena->epoch.demand);
    arena->epoch.outlook =
        (struct outlook){.memory_per_cpu_bytes = arena->epoch.outlook.memory_per_cpu_bytes};
    arena->limit.max_used = heap_used_pages(&arena->heap);
    arena->limit.max_held = arena->limit.max_used + heap_dirty_pages(&arena->heap);
    arena->limit.terms.peak_bytes = used_bytes(arena);
    arena->limit.terms.surplus_bytes = 0;
    publish_limit(arena);
}

void arena_after_fork(struct arena *arena, bool child) {
    if (child && lock_reset_in_child(&arena->purger.lock)) {
        heap_lose_purge(&arena->heap);
    }
    if (child) {
        arena_start_child(arena);
    }
    lock_release_after_fork(&arena->lock);
    for (unsigned i = arena->depot_count; i-- > 0;) {
        depot_after_fork(&arena->depots[i], child);
    }
    cpu_caches_after_fork(arena->caches, child);
    lock_release_after_fork(&arena->purger.lock);
}
