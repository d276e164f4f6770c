#include "arena/check.h"

#include "arena/epoch.h"
#include "arena/flush.h"
#include "arena/helper.h"
#include "arena/limit.h"
#include "arena/select.h"
#include "arena/verify.h"
#include "base/assert.h"
#include "base/size.h"
#include "os/cpus.h"

/* One check in this many reads the clock. */
#define CHECKS_PER_CLOCK 16
/* After the kernel has refused to start a helper, one check in this many tries
 * again. */
#define CHECKS_PER_RETRY 65536
/* A helper that has ended no epoch for this many epochs counts as not
 * running. */
#define OVERDUE_EPOCHS 10

/* Returns whether the helper has ended no epoch for long. The helper may be
 * missing, in a copy of the process that the C library did not make, or it may
 * get no CPU. */
static bool is_overdue(const struct arenas *arenas) {
    uint64_t start = atomic_load_explicit(&arenas->epoch.start_ns, memory_order_relaxed);
    return clock_elapsed_ns(clock_coarse_ns(), start) >= OVERDUE_EPOCHS * DEMAND_EPOCH_NS;
}

/* Copies the misuse records that are not reported yet. The caller holds the
 * heap's lock. */
static size_t take_notes(struct arena *arena, struct misuse_record *notes) {
    size_t count = 0;
    const struct heap *heap = &arena->heap;
    size_t number = size_max(arena->misuses_reported, size_minus(heap->misuses, MISUSE_RECORDS));
    while (number < heap->misuses) {
        notes[count++] = heap->misuse[number++ % MISUSE_RECORDS];
    }
    calm_assert(count <= MISUSE_RECORDS && number == heap->misuses, count, number);
    arena->misuses_reported = number;
    return count;
}

/* Takes the records before it releases the lock, so that the thread that made a
 * record reports it. Also reports what the helper found. Reports without the
 * lock, since a handler of the abort may allocate. */
static __attribute__((noinline)) void unlock_and_report(const struct arenas *arenas, struct arena *arena) {
    struct misuse_record notes[MISUSE_RECORDS];
    size_t count = take_notes(arena, notes);
    heap_unlock(arena);
    for (size_t i = 0; i < count; i++) {
        arenas->misused(&notes[i]);
    }
}

/* Counts the check, and returns its number. */
static uint64_t count_check(struct arena *arena, bool is_first_thread) {
    uint64_t checks = atomic_load_explicit(&arena->checks, memory_order_relaxed) + 1;
    atomic_store_explicit(&arena->checks, checks, memory_order_relaxed);
    if (!is_first_thread) {
        uint64_t others = atomic_load_explicit(&arena->checks_by_others, memory_order_relaxed);
        atomic_store_explicit(&arena->checks_by_others, others + 1, memory_order_relaxed);
    }
    return checks;
}

void heap_unlock_and_check(struct arenas *arenas, struct arena *arena) {
    calm_assert(lock_is_mine(&arena->lock));
    bool is_first = thread_pointer() == arenas->helper.first_thread;
    uint64_t checks = count_check(arena, is_first);
    bool clock = checks % CHECKS_PER_CLOCK == 0;
    bool retry = checks % CHECKS_PER_RETRY == 0;
    bool verifies = verify_is_due(arenas, checks);
    bool crowded = arena_is_crowded(arena);
    bool over = false;
    bool wanted = false;
    if (clock) {
        end_backoff(arenas);
    }
    if (is_report_due(arenas, arena)) {
        struct levels totals = note_levels(arenas, report_levels(arenas, arena));
        size_t limit = limit_at_leave(arenas, totals);
        over = is_over(arenas, totals.dirty, limit);
        /* The thread wants a helper if more memory may stay with one. */
        wanted = over && limit_if_background(arenas, totals, true).max > limit;
        over |= batch_is_stale(arenas, totals);
    } else {
        publish_levels(arena);
    }
    if (__builtin_expect(arena->heap.misuses != arena->misuses_reported, 0)) {
        unlock_and_report(arenas, arena);
    } else {
        heap_unlock(arena);
    }
    if (__builtin_expect(crowded, 0)) {
        arena_grow(arenas);
    }
    int helper = atomic_load_explicit(&arenas->helper.state, memory_order_seq_cst);
    /* In the state HELPER_AWAY, any thread starts a helper immediately, since
     * it may take long until another thread leaves the heap. In the states
     * HELPER_NONE and HELPER_SINGLE, the first thread starts a helper only if
     * more memory is worth keeping than may stay without one. */
    bool missed = helper == HELPER_AWAY || (helper == HELPER_SINGLE && (!is_first || wanted)) ||
                  (helper == HELPER_NONE && ((!is_first && clock) || wanted)) ||
                  (helper == HELPER_REFUSED && retry);
    bool started = missed && helper_is_wanted(arenas) && helper_start(arenas, (enum helper_state)helper);
    if (__builtin_expect(over, 0)) {
        enforce_limit(arenas);
    }
    bool has_background = started || helper == HELPER_RUNS || helper == HELPER_ENDED;
    if (clock && (!has_background || (helper == HELPER_RUNS && is_overdue(arenas)))) {
        epoch_advance(arenas, false);
    }
    if (verifies) {
        verify_arena(arenas);
    }
}
