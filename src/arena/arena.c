#include "arena/arena.h"

#include "arena/check.h"
#include "arena/flush.h"
#include "arena/helper.h"
#include "arena/limit.h"
#include "arena/purger.h"
#include "arena/select.h"
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

#include <string.h>

/* The bytes that the depots may hold for each CPU: small blocks; medium blocks
 * at first; medium blocks after the bins have grown. */
#define DEPOT_SMALL_PER_CPU  ((size_t)512 << 10)
#define DEPOT_MEDIUM_PER_CPU ((size_t)256 << 10)
#define DEPOT_GROWN_PER_CPU  ((size_t)4 << 20)
/* Under a limit on address space, the depots' tables take at most
 * 1/DEPOT_LIMIT_SHARE of it. */
#define DEPOT_LIMIT_SHARE 128

static size_t depot_bin_blocks(const struct arenas *arenas, const struct size_classes *classes) {
    if (!arenas->of[0].heap.space.limited) {
        return DEPOT_BIN_BLOCKS;
    }
    size_t of_all = vm_limit_bytes() / DEPOT_LIMIT_SHARE / sizeof(void *) / classes->count;
    return size_min(of_all / size_max(arenas->depot_count, 1), DEPOT_BIN_BLOCKS);
}

/* Sets the map for a heap that has a range of its own. */
static void map_alone(struct arenas *arenas) {
    const struct space *space = &arenas->of[0].heap.space;
    arenas->map.base = space->base;
    arenas->map.first_classes = space->first_classes;
    arenas->map.page_shift = space->page_shift;
    __atomic_store_n(&arenas->map.quanta, space->quanta, __ATOMIC_RELAXED);
}

/* Starts the first arena, and reserves address space for the others. If address
 * space is short, there is no other arena. */
static bool start_first(struct arenas *arenas, const struct size_classes *classes, size_t address_space,
                        size_t cpus) {
    int heaps = setting_value(&arenas->settings.heaps);
    unsigned forced = heaps > HEAPS_0 ? (unsigned)(heaps - HEAPS_0) : 0;
    unsigned parts = forced > 0 ? arena_power_above(forced) : arena_max_for((double)cpus);
    bool several = parts > 1 && space_reserve_parts(&arenas->map, parts, address_space);
    size_t offset = vm_round_up(sizeof *arenas->work);
    size_t bytes = offset + (several ? parts + 1 : 1) * sizeof *arenas->of;
    char *base = vm_map(bytes);
    struct arena *first = base == NULL ? NULL : (struct arena *)(void *)(base + offset);
    bool started = first != NULL && (several ? heap_init_part(&first->heap, classes, &arenas->map, 0)
                                             : heap_init(&first->heap, classes, address_space));
    if (!started) { /* the next call starts anew */
        if (several) {
            space_unreserve_parts(&arenas->map);
        }
        if (base != NULL) {
            vm_release(base, bytes);
        }
        return false;
    }
    arena_prepare(first);
    arenas->of = first;
    arenas->work = (struct workspace *)(void *)base;
    if (!several) {
        map_alone(arenas);
    }
    unsigned most = several ? parts : 1;
    arenas->max_active = forced > 0 && forced < most ? forced : most;
    arenas->active = forced > 0 ? arenas->max_active : 1;
    arenas->started = 1;
    atomic_store_explicit(&arenas->states[0], ARENA_READY, memory_order_release);
    return true;
}

bool arena_init(struct arenas *arenas, const struct size_classes *classes, struct cpu_caches *caches,
                size_t address_space, bool with_depots, void (*misused)(const struct misuse_record *misuse)) {
    arenas->caches = caches;
    arenas->misused = misused;
    lock_set_rank(&arenas->purger.lock, LOCK_PURGER);
    lock_set_rank(&arenas->start_lock, LOCK_ARENA_START);
    arenas->helper.first_thread = thread_pointer();
    arenas->helper.process = (int)os_syscall(SYS_getpid);
    cpu_affinity(0, &arenas->helper.cpus);
    size_t cpus = size_max(cpu_set_count(&arenas->helper.cpus), 1);
    if (!start_first(arenas, classes, address_space, cpus)) {
        return false;
    }
    /* Segments are too short for huge-page regions, which are aligned. */
    if (arenas->of[0].heap.space.quanta > 0) {
        arenas->of[0].heap.runs.region_pages = huge_pages_request_bytes() / page_bytes(arenas);
    }
    /* At most DEPOT_CPUS CPUs share one depot even if they are on several
     * nodes. The number of nodes is then not read from a file. */
    unsigned nodes = cpus > DEPOT_CPUS && caches->rseq.node != 0 ? nodes_possible() : 1;
    arenas->nodes = nodes;
    size_t each = size_min(cpus / nodes / DEPOT_CPUS, MAX_DEPOTS / nodes);
    arenas->depots_per_node = with_depots ? (unsigned)size_max(each, 1) : 0;
    arenas->depot_count = (unsigned)size_min((size_t)nodes * arenas->depots_per_node, MAX_DEPOTS);
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        depot_init(&arenas->depots[i], classes, depot_bin_blocks(arenas, classes),
                   DEPOT_SMALL_PER_CPU * cpus / arenas->depot_count,
                   DEPOT_MEDIUM_PER_CPU * cpus / arenas->depot_count,
                   DEPOT_GROWN_PER_CPU * cpus / arenas->depot_count);
    }
    cpu_usage_sample(&arenas->epoch.cpu_usage);
    atomic_store_explicit(&arenas->epoch.start_ns, clock_coarse_ns(), memory_order_relaxed);
    atomic_store_explicit(&arenas->machine.max_footprint, SIZE_MAX, memory_order_relaxed);
    atomic_store_explicit(&arenas->machine.scarcity_factor, 1, memory_order_relaxed);
    arenas->epoch.family_share = 1;
    if (atomic_load_explicit(&arenas->machine.gib_per_cpu, memory_order_relaxed) == 0) {
        note_offer(arenas, memory_total_bytes(), (double)cpus);
    }
    arenas->epoch.outlook.memory_per_cpu_bytes = (uint64_t)memory_per_cpu_bytes(arenas);
    calm_assert(arenas->depot_count <= MAX_DEPOTS && arenas->depots_per_node <= MAX_DEPOTS,
                arenas->depot_count);
    struct retention_terms terms = new_terms(arenas);
    set_terms(arenas, &terms);
    return true;
}

size_t arena_trim_by_helper(struct arenas *arenas, size_t keep_bytes) {
    purger_enter(arenas);
    flush_caches(arenas, true);
    size_t purged = purge_down(arenas, keep_bytes / page_bytes(arenas), 0, REASON_ASKED);
    purge_to_limit(arenas);
    release_clean(arenas);
    purger_leave(arenas);
    return purged * page_bytes(arenas);
}

size_t arena_trim(struct arenas *arenas, size_t keep_bytes) {
    size_t bytes = arena_trim_by_helper(arenas, keep_bytes);
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        heap_lock(arena);
        heap_unlock_and_check(arenas, arena); /* reports invalid frees that came to light */
    }
    return bytes;
}

void arena_limit_space(struct arenas *arenas, size_t bytes) {
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        heap_lock(arena);
        space_limit(&arena->heap.space, bytes);
        heap_unlock(arena);
    }
    if (arenas->map.parts == 0) {
        map_alone(arenas);
        return;
    }
    /* No arena starts meanwhile. Later ones find no part. */
    lock_acquire(&arenas->start_lock);
    unsigned started = atomic_load_explicit(&arenas->started, memory_order_relaxed);
    bool releases = bytes / 2 < arenas->map.quanta << SPACE_QUANTUM_SHIFT;
    for (unsigned i = 0; i < arenas->map.parts && releases; i++) {
        if (atomic_load_explicit(&arenas->states[i], memory_order_relaxed) == ARENA_UNUSED) {
            atomic_store_explicit(&arenas->states[i], ARENA_FAILED, memory_order_relaxed);
            if (i < started) {
                space_release_part(&arenas->map, i);
            }
        }
    }
    if (releases && started < arenas->map.parts) {
        space_release_parts(&arenas->map, started);
    }
    lock_release(&arenas->start_lock);
}

void arena_refresh(struct arenas *arenas) {
    purger_enter(arenas);
    update_terms(arenas, REASON_LIMIT);
    purger_leave(arenas);
    enforce_limit(arenas);
}

static bool holds_a_heap(const struct arenas *arenas) {
    bool held = false;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        held |= lock_is_mine(&arena->lock);
    }
    return held;
}

bool arena_is_held(const struct arenas *arenas) {
    bool held = lock_is_mine(&arenas->start_lock) || lock_is_mine(&arenas->purger.lock) ||
                holds_a_heap(arenas) || cpu_caches_are_held(arenas->caches);
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        held |= depot_is_held(&arenas->depots[i]);
    }
    return held;
}

void arena_shrink_for_fork(struct arenas *arenas) {
    struct levels totals = sum_levels(arenas);
    struct limit limit = limit_at_fork(arenas, totals);
    if (!is_over(arenas, totals.dirty, limit.max) || arena_is_held(arenas)) {
        return;
    }
    purger_enter(arenas);
    totals = report_all(arenas);
    limit = limit_at_fork(arenas, totals);
    /* Keeping the memory for the break-even time costs as much as this purge.
     * Forks therefore purge at most once in that time. */
    size_t pause = (size_t)(arenas->work->demand.break_even_s * 1e9 / (double)DEMAND_EPOCH_NS);
    size_t epoch = 1 + arenas->work->demand.epochs;
    bool over = is_over(arenas, totals.dirty, limit.max); /* another thread may have purged meanwhile */
    if (over && (arenas->purger.fork_epoch == 0 || epoch > arenas->purger.fork_epoch + pause)) {
        arenas->purger.fork_epoch = epoch;
        purge_down(arenas, limit.keep, limit.max, REASON_LIMIT);
    }
    purge_to_limit(arenas); /* as after all reports without a check */
    purger_leave(arenas);
}

/*
 * Acquires the locks in the order of their ranks, the heaps' last.
 *
 * A signal handler may fork while the thread that it interrupted holds some of
 * the locks. The fork then waits only for locks of later ranks. It does not
 * wait for a lock of an earlier rank, since the holder of that lock may itself
 * wait for a lock of the interrupted thread. If another thread is purging at
 * the time of the fork, the child loses that thread's batch.
 */
void arena_before_fork(struct arenas *arenas) {
    bool holds_heap = holds_a_heap(arenas);
    bool waits = !holds_heap;
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        waits &= !depot_is_held(&arenas->depots[i]);
    }
    bool waits_for_depots = waits;
    waits &= !cpu_caches_are_held(arenas->caches);
    if (waits) {
        lock_acquire_for_fork(&arenas->start_lock, true);
    } else {
        lock_acquire_unless_forking(&arenas->start_lock);
    }
    lock_acquire_for_fork(&arenas->purger.lock, waits);
    cpu_caches_before_fork(arenas->caches, waits);
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        depot_before_fork(&arenas->depots[i], waits_for_depots);
    }
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        if (holds_heap) {
            lock_acquire_unless_forking(&arena->lock);
        } else {
            lock_acquire_for_fork(&arena->lock, true);
        }
    }
}

/* Frees the arena that a thread was starting which the child lacks. What it had
 * reserved is lost. */
static void reset_starting(struct arenas *arenas) {
    for (unsigned i = 0; i < MAX_ARENAS; i++) {
        if (atomic_load_explicit(&arenas->states[i], memory_order_relaxed) == ARENA_STARTING) {
            memset(&arenas->of[i], 0, sizeof arenas->of[i]);
            atomic_store_explicit(&arenas->states[i], ARENA_UNUSED, memory_order_relaxed);
        }
    }
}

/* The child has no helper, and its first thread is the one that forked. A word
 * that keeps its value is not written, because a page that the child does not
 * write stays shared with its parent. The caller holds the heaps' locks, or the
 * process is single-threaded. */
void arena_start_child(struct arenas *arenas) {
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        marks_after_fork(&arena->heap);
        if (arena->has_colors) {
            arena->heap.colors.seed = random_process_seed();
        }
        report_levels(arenas, arena);
    }
    helper_forget(arenas);
    if (arenas->helper.first_thread != thread_pointer()) {
        arenas->helper.first_thread = thread_pointer();
    }
    /* The parent's demand says little about the child's. A write to a free page
     * that the child shares with its parent costs as much as a write to a
     * purged page. */
    demand_forget(&arenas->work->demand);
    arenas->epoch.outlook =
        (struct outlook){.memory_per_cpu_bytes = arenas->epoch.outlook.memory_per_cpu_bytes};
    atomic_store_explicit(&arenas->limit.max_used, used_pages(arenas), memory_order_relaxed);
    atomic_store_explicit(&arenas->limit.max_held, used_pages(arenas) + dirty_pages(arenas),
                          memory_order_relaxed);
    set_background_purge(arenas, false);
    struct retention_terms terms = terms_now(arenas);
    terms.peak_bytes = used_bytes(arenas);
    terms.surplus_bytes = 0;
    set_terms(arenas, &terms);
    adapt_batch(arenas);
}

void arena_after_fork(struct arenas *arenas, bool child) {
    unsigned number = 0;
    if (child && lock_reset_in_child(&arenas->purger.lock)) {
        for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
            heap_lose_purge(&arena->heap);
        }
    }
    if (child && lock_reset_in_child(&arenas->start_lock)) {
        reset_starting(arenas);
    }
    if (child) {
        arena_start_child(arenas);
    }
    /* Another thread that forks must not take a lock for one of this fork any
     * more once the first lock is free. */
    number = 0;
    lock_end_fork(&arenas->start_lock);
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        lock_end_fork(&arena->lock);
    }
    number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        lock_release_ended(&arena->lock);
        if (child) {
            lock_reset_in_child(&arena->lock); /* of a thread that was forking, too */
        }
    }
    for (unsigned i = arenas->depot_count; i-- > 0;) {
        depot_after_fork(&arenas->depots[i], child);
    }
    cpu_caches_after_fork(arenas->caches, child);
    lock_release_after_fork(&arenas->purger.lock);
    lock_release_ended(&arenas->start_lock);
}
