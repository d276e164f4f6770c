#include "governor/heap_door.h"

#include "governor/bound.h"
#include "governor/helper.h"
#include "governor/purger.h"
#include "governor/shed.h"
#include "os/cpus.h"
#include "policy/adaptive.h"

/* The clock is read at one look in so many. */
#define LOOKS_PER_CLOCK 16

/* From now on there is a helper. */
static void tend(struct governor *governor) {
    lock_acquire(&governor->purge_lock);
    governor->band = ADAPTIVE_BAND_MOST_TENDED;
    purger_set_factor(governor);
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

void heap_leave(struct governor *governor) {
    size_t dirty = heap_dirty_pages(&governor->heap);
    if (dirty < governor->low_dirty_pages) {
        governor->low_dirty_pages = dirty;
    }
    bool clock = ++governor->looks % LOOKS_PER_CLOCK == 0;
    bool is_first = thread_pointer() == governor->first_thread;
    if (!is_first) {
        uint64_t looks = atomic_load_explicit(&governor->looks_of_others, memory_order_relaxed);
        atomic_store_explicit(&governor->looks_of_others, looks + 1, memory_order_relaxed);
    }
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
    /* One that went is missed at once, since nobody may come again for long. */
    bool missed = helper == HELPER_AWAY || (helper == HELPER_ALONE && !is_first) ||
                  (helper == HELPER_NONE && !is_first && clock);
    if (missed && governor_wants_helper(governor) && helper_start(governor, (enum helper_state)helper)) {
        if (helper == HELPER_NONE) {
            tend(governor);
        }
        return;
    }
    if (clock && helper != HELPER_RUNS && helper != HELPER_ELSEWHERE) {
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
