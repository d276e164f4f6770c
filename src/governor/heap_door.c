#include "governor/heap_door.h"

#include "governor/bound.h"
#include "governor/helper.h"
#include "governor/purger.h"
#include "governor/shed.h"
#include "os/cpus.h"

/* The clock is read at one look in so many. */
#define LOOKS_PER_CLOCK 16
/* Where the kernel has refused a helper, one is tried again at one look in so many. */
#define LOOKS_PER_RETRY 65536

/* In windows: then the helper does not run. */
#define OVERDUE_WINDOWS 10

/* Where there is no helper, in the state that was seen, one is started. True if it was, by this thread. */
static bool start_helper(struct governor *governor, int seen) {
    return governor_wants_helper(governor) && helper_start(governor, (enum helper_state)seen);
}

/* A helper ended in a copy of the process that the C library did not make, or gets no CPU. */
static bool is_overdue(const struct governor *governor) {
    uint64_t start = atomic_load_explicit(&governor->window_start_ns, memory_order_relaxed);
    return clock_elapsed_ns(clock_coarse_ns(), start) >= OVERDUE_WINDOWS * WINDOW_NS;
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

static void note_levels(struct governor *governor) {
    size_t used = heap_used_pages(&governor->heap);
    size_t dirty = heap_dirty_pages(&governor->heap);
    if (used > governor->max_used) {
        governor->max_used = used;
        size_t bytes = used << governor->heap.space.page_shift;
        governor->terms.peak_bytes = governor->terms.peak_bytes > bytes ? governor->terms.peak_bytes : bytes;
    }
    if (used + dirty > governor->max_held) {
        governor->max_held = used + dirty;
    }
    size_t free_pages = free_and_given_pages(governor);
    if (free_pages < governor->min_free) {
        governor->min_free = free_pages;
    }
}

/* Whether more may stay once a helper runs. Under the heap's lock. */
static bool would_keep_more(const struct governor *governor) {
    struct retention_terms terms = governor->terms;
    terms.tended = true;
    return bound_by(governor, &terms).limit > governor->limit_pages;
}

void heap_leave(struct governor *governor) {
    note_levels(governor);
    bool clock = ++governor->looks % LOOKS_PER_CLOCK == 0;
    bool retry = governor->looks % LOOKS_PER_RETRY == 0 && !governor->has_clients;
    bool is_first = thread_pointer() == governor->first_thread;
    if (!is_first) {
        uint64_t looks = atomic_load_explicit(&governor->looks_of_others, memory_order_relaxed);
        atomic_store_explicit(&governor->looks_of_others, looks + 1, memory_order_relaxed);
    }
    if (clock) {
        forgive(governor);
    }
    bool over = is_over(governor, publish_limit(governor));
    bool wanted = over && would_keep_more(governor);
    bool misused = governor->heap.misuses != governor->misuses_reported;
    heap_exit(governor);
    if (__builtin_expect(misused, 0)) {
        report_misuse(governor);
    }
    if (governor->owner != NULL) {
        if (__builtin_expect(over, 0)) {
            relieve(governor);
        }
        return; /* which looks at the clock by itself */
    }
    int helper = atomic_load_explicit(&governor->helper, memory_order_seq_cst);
    /* One that went is missed at once, since no thread may come again for long; and by a lone thread, too,
     * where more is worth keeping than what may stay untended. */
    bool missed = helper == HELPER_AWAY || (helper == HELPER_ALONE && (!is_first || wanted)) ||
                  (helper == HELPER_NONE && ((!is_first && clock) || wanted)) ||
                  (helper == HELPER_REFUSED && retry);
    bool started = missed && start_helper(governor, helper);
    if (__builtin_expect(over, 0)) {
        relieve(governor);
    }
    bool tended = started || helper == HELPER_RUNS || helper == HELPER_ELSEWHERE;
    if (clock && (!tended || (helper == HELPER_RUNS && is_overdue(governor)))) {
        governor_tick(governor, false);
    }
}

/* By one look at the owner: another might have become one before the unlock. */
bool governor_lock(struct governor *governor) {
    if (governor->owner != NULL) {
        return false;
    }
    lock_acquire(&governor->heap_lock);
    governor->heap_locks++;
    return true;
}

void governor_unlock(struct governor *governor) {
    lock_release(&governor->heap_lock);
}
