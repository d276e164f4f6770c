#include "governor/check.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/epoch.h"
#include "governor/flush.h"
#include "governor/helper.h"
#include "governor/limit.h"
#include "governor/verify.h"
#include "os/cpus.h"

/* The clock is read at one check in so many. */
#define CHECKS_PER_CLOCK 16
/* Where the kernel has refused a helper, one is tried again at one check in so many. */
#define CHECKS_PER_RETRY 65536
/* A helper that ended no epoch for so many does not run. */
#define OVERDUE_EPOCHS 10

/* The helper ended in a copy of the process that the C library did not make, or gets no CPU. */
static bool is_overdue(const struct governor *governor) {
    uint64_t start = atomic_load_explicit(&governor->epoch_start_ns, memory_order_relaxed);
    return clock_elapsed_ns(clock_coarse_ns(), start) >= OVERDUE_EPOCHS * DEMAND_EPOCH_NS;
}

/* Under the heap's lock. */
static size_t take_notes(struct governor *governor, struct misuse_record *notes) {
    size_t count = 0;
    const struct heap *heap = &governor->heap;
    size_t number = size_max(governor->misuses_reported, size_minus(heap->misuses, MISUSE_RECORDS));
    while (number < heap->misuses) {
        notes[count++] = heap->misuse[number++ % MISUSE_RECORDS];
    }
    calm_assert(count <= MISUSE_RECORDS && number == heap->misuses, count, number);
    governor->misuses_reported = number;
    return count;
}

size_t governor_take_misuse(struct governor *governor, struct misuse_record *notes) {
    heap_lock(governor);
    size_t count = take_notes(governor, notes);
    heap_unlock(governor);
    return count;
}

/* Takes the notes before the lock is released: the thread that made one reports it. Reports without the lock,
 * since a handler of the abort may allocate. What the helper found is reported here, too. In a heap with
 * clients they report it, once they have left the heap. */
static __attribute__((noinline)) void unlock_and_report(struct governor *governor) {
    struct misuse_record notes[MISUSE_RECORDS];
    if (governor->has_clients) {
        heap_unlock(governor);
        atomic_store_explicit(&governor->misuse_waits, true, memory_order_release);
        return;
    }
    size_t count = take_notes(governor, notes);
    heap_unlock(governor);
    for (size_t i = 0; i < count; i++) {
        governor->misused(&notes[i]);
    }
}

static void note_levels(struct governor *governor) {
    size_t used = heap_used_pages(&governor->heap);
    size_t dirty = heap_dirty_pages(&governor->heap);
    if (used > governor->max_used) {
        governor->max_used = used;
        size_t bytes = used << governor->heap.space.page_shift;
        governor->terms.peak_bytes = size_max(governor->terms.peak_bytes, bytes);
    }
    calm_assert(governor->max_used >= used, governor->max_used, used);
    governor->max_held = size_max(governor->max_held, used + dirty);
}

void heap_unlock_and_check(struct governor *governor) {
    calm_assert(governor->exclusive || lock_is_mine(&governor->lock));
    note_levels(governor);
    bool clock = ++governor->checks % CHECKS_PER_CLOCK == 0;
    bool retry = governor->checks % CHECKS_PER_RETRY == 0 && !governor->has_clients;
    bool verifies = governor_should_verify(governor);
    bool is_first = thread_pointer() == governor->first_thread;
    if (!is_first) {
        uint64_t checks = atomic_load_explicit(&governor->checks_by_others, memory_order_relaxed);
        atomic_store_explicit(&governor->checks_by_others, checks + 1, memory_order_relaxed);
    }
    if (clock) {
        end_backoff(governor);
    }
    bool over = is_over(governor, publish_limit(governor));
    /* Whether more may stay once a helper runs. */
    bool wanted = over && limit_if_background(governor, true).max > governor->limit_pages;
    if (__builtin_expect(governor->heap.misuses != governor->misuses_reported, 0)) {
        unlock_and_report(governor);
    } else {
        heap_unlock(governor);
    }
    int helper = atomic_load_explicit(&governor->helper, memory_order_seq_cst);
    /* One that went away is started at once, since no thread may come again for long; a lone thread starts
     * one where more is worth keeping than may stay without. */
    bool missed = helper == HELPER_AWAY || (helper == HELPER_ALONE && (!is_first || wanted)) ||
                  (helper == HELPER_NONE && ((!is_first && clock) || wanted)) ||
                  (helper == HELPER_REFUSED && retry);
    bool started =
        missed && governor_wants_helper(governor) && helper_start(governor, (enum helper_state)helper);
    if (__builtin_expect(over, 0)) {
        enforce_limit(governor);
    }
    bool has_background = started || helper == HELPER_RUNS || helper == HELPER_ELSEWHERE;
    if (clock && (!has_background || (helper == HELPER_RUNS && is_overdue(governor)))) {
        governor_tick(governor, false);
    }
    if (verifies) {
        governor_verify(governor);
    }
}
