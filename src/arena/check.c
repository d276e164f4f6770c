#include "arena/check.h"

#include "arena/epoch.h"
#include "arena/flush.h"
#include "arena/helper.h"
#include "arena/limit.h"
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
static bool is_overdue(const struct arena *arena) {
    uint64_t start = atomic_load_explicit(&arena->epoch.start_ns, memory_order_relaxed);
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
static __attribute__((noinline)) void unlock_and_report(struct arena *arena) {
    struct misuse_record notes[MISUSE_RECORDS];
    size_t count = take_notes(arena, notes);
    heap_unlock(arena);
    for (size_t i = 0; i < count; i++) {
        arena->misused(&notes[i]);
    }
}

static void note_levels(struct arena *arena) {
    size_t used = heap_used_pages(&arena->heap);
    size_t dirty = heap_dirty_pages(&arena->heap);
    if (used > arena->limit.max_used) {
        arena->limit.max_used = used;
        size_t bytes = used << arena->heap.space.page_shift;
        arena->limit.terms.peak_bytes = size_max(arena->limit.terms.peak_bytes, bytes);
    }
    calm_assert(arena->limit.max_used >= used, arena->limit.max_used, used);
    arena->limit.max_held = size_max(arena->limit.max_held, used + dirty);
}

void heap_unlock_and_check(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->lock));
    note_levels(arena);
    bool clock = ++arena->limit.checks % CHECKS_PER_CLOCK == 0;
    bool retry = arena->limit.checks % CHECKS_PER_RETRY == 0;
    bool verifies = verify_is_due(arena);
    bool is_first = thread_pointer() == arena->helper.first_thread;
    if (!is_first) {
        uint64_t checks = atomic_load_explicit(&arena->limit.checks_by_others, memory_order_relaxed);
        atomic_store_explicit(&arena->limit.checks_by_others, checks + 1, memory_order_relaxed);
    }
    if (clock) {
        end_backoff(arena);
    }
    bool over = is_over(arena, publish_limit(arena));
    /* The thread wants a helper if more memory may stay with one. */
    bool wanted = over && limit_if_background(arena, true).max > arena->limit.pages;
    if (__builtin_expect(arena->heap.misuses != arena->misuses_reported, 0)) {
        unlock_and_report(arena);
    } else {
        heap_unlock(arena);
    }
    int helper = atomic_load_explicit(&arena->helper.state, memory_order_seq_cst);
    /* In the state HELPER_AWAY, any thread starts a helper immediately, since
     * it may take long until another thread leaves the heap. In the states
     * HELPER_NONE and HELPER_SINGLE, the first thread starts a helper only if
     * more memory is worth keeping than may stay without one. */
    bool missed = helper == HELPER_AWAY || (helper == HELPER_SINGLE && (!is_first || wanted)) ||
                  (helper == HELPER_NONE && ((!is_first && clock) || wanted)) ||
                  (helper == HELPER_REFUSED && retry);
    bool started = missed && helper_is_wanted(arena) && helper_start(arena, (enum helper_state)helper);
    if (__builtin_expect(over, 0)) {
        enforce_limit(arena);
    }
    bool has_background = started || helper == HELPER_RUNS || helper == HELPER_ENDED;
    if (clock && (!has_background || (helper == HELPER_RUNS && is_overdue(arena)))) {
        epoch_advance(arena, false);
    }
    if (verifies) {
        verify_arena(arena);
    }
}
