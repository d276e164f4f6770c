#include "governor.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>

#include "activation.h"
#include "arena.h"
#include "arenas.h"
#include "base/assert.h"
#include "base/size.h"
#include "glibc_malloc.h"
#include "glibc_proof.h"
#include "glibc_settings.h"
#include "os/control.h"
#include "os/process.h"
#include "state.h"
#include "thresholds.h"
#include "trim.h"

/* What a thread frees or allocates before its next check, at least; the frees add to what may be retained. */
#define MIN_CHECK_BYTES (256UL << 10)

/* The same for a thread that would run out of usable memory at its arena's top before. */
#define MIN_ALLOC_CHECK_BYTES (16UL << 10)

#define MAX_ROUNDS 8

static const char unknown_arena[] = "an arena is not laid out as known";

/* Carries out a request of another process. The caller holds state.busy and no arena. */
static void carry_out_request(void) {
    calm_assert(LOAD(&state.busy));
    struct control_claim claim;
    if (!control_claim(&os_control, &claim)) {
        return;
    }
    bool known = claim.request == CONTROL_TRIM;
    size_t keep_bytes = (size_t)claim.argument / size_max(LOAD(&state.counters.arenas), 1);
    size_t purged = known ? trim_arenas(keep_bytes) : 0;
    control_complete(&os_control, &claim, known ? 0 : ENOSYS, purged);
}

/* The caller holds state.busy and no arena. */
static void walk_and_decide(bool trim) {
    calm_assert(LOAD(&state.busy));
    if (!arenas_walk()) {
        activation_end(unknown_arena);
        return;
    }
    STORE(&state.counters.cpus_hundredths, (size_t)(cpu_usage_sample(&state.cpu_usage) * 100));
    thresholds_update();
    if (control_is_pending(&os_control)) {
        carry_out_request();
    }
    if (trim) {
        trim_if_needed();
    }
}

/*
 * Walks over all arenas, sets the thresholds and, if asked, trims; one thread at a time. A thread that finds
 * `busy` taken leaves the trim to the one that holds it: what became free meanwhile may be the last that ever
 * does. That thread repeats the walk, but only so often on behalf of others.
 */
static void govern(bool trim) {
    if (trim) {
        atomic_store_explicit(&state.trim_wanted, true, memory_order_release);
    }
    for (int round = 0; round < MAX_ROUNDS; round++) {
        if (atomic_exchange_explicit(&state.busy, true, memory_order_acquire)) {
            return;
        }
        walk_and_decide(atomic_exchange_explicit(&state.trim_wanted, false, memory_order_acquire));
        atomic_store_explicit(&state.busy, false, memory_order_seq_cst);
        if (!atomic_load_explicit(&state.trim_wanted, memory_order_seq_cst)) {
            return;
        }
    }
}

struct arena *governor_first_arena_of(const void *block) {
    if (!activation_is_on()) {
        return no_arena;
    }
    if (!glibc_prove_heap_of_block(block)) {
        activation_end("a heap is not laid out as known");
        return no_arena;
    }
    /* In the total order either this load sees that activation_end began, or what that stores comes later. */
    atomic_store(&governed.heaps_proved, true);
    if (atomic_load(&activation) != ACTIVATION_ON) {
        STORE(&governed.heaps_proved, false);
        return no_arena;
    }
    return heap_of(block)->arena;
}

/* An allocating thread never trims: it might trim the very pages that it is about to use. */
static bool may_trim(enum check_reason reason, bool top_grew) {
    return reason != CHECK_ALLOCATED && trim_is_due(reason == CHECK_FREED && top_grew);
}

size_t governor_check(struct arena *arena, enum check_reason reason, size_t freed_bytes) {
    if (arena == no_arena || !activation_is_on()) {
        /* An arena that was looked for before governing began is none yet. */
        return LOAD(&activation) == ACTIVATION_OFF ? SIZE_MAX : 0;
    }
    ADD(&state.freed_bytes, freed_bytes);
    size_t check_bytes = size_max(LOAD(&state.counters.pad_each_bytes), MIN_CHECK_BYTES);
    size_t allowance = check_bytes;
    int saved_errno = errno;
    bool top_grew = false;

    if (arena_trylock(arena)) {
        bool proved = arenas_record_change(arena, check_bytes / 2, &top_grew);
        if (proved) {
            size_t padding = thresholds_claim_padding(arena);
            if (reason == CHECK_ALLOCATED) {
                allowance = size_max(size_min(padding, check_bytes), MIN_ALLOC_CHECK_BYTES);
            }
        }
        arena_unlock(arena);
        if (!proved) {
            activation_end(unknown_arena);
        }
    }
    if (reason == CHECK_FREED && LOAD(&state.counters.arenas) > 1) {
        arenas_update_next();
    }
    if (activation_is_on()) {
        bool trim = may_trim(reason, top_grew);
        if (trim || thresholds_have_moved() || control_is_pending(&os_control)) {
            govern(trim);
            if (!trim && may_trim(reason, top_grew)) {
                govern(true); /* the threshold has just fallen, and this check may be the last */
            }
        }
    }
    errno = saved_errno;
    return allowance;
}

void governor_note_calloc(const void *block, size_t bytes) {
    if (block != NULL && !block_is_mmapped(block)) {
        thresholds_note_calloc(bytes);
    }
}

void governor_note_mmapped_free(size_t chunk_bytes) {
    /* Before the start, too: glibc raises its own threshold then, and governing goes on from there. */
    if (glibc_settings_raise_mmap_threshold(chunk_bytes) && activation_is_on()) {
        int saved_errno = errno;
        __libc_mallopt(M_MMAP_THRESHOLD, (int)chunk_bytes);
        ADD(&state.counters.mmap_threshold_raises, 1);
        errno = saved_errno;
    }
}

/*
 * A child starts with a copy of all that is resident: it is better without what may be given back. Only if
 * there are several arenas: glibc does not lock them in a process of one thread, and a signal handler may
 * call fork in the midst of malloc. It waits for nothing, for the same reason.
 */
static void before_fork(void) {
    if (!activation_is_on() || LOAD(&state.counters.arenas) < 2 ||
        atomic_exchange_explicit(&state.busy, true, memory_order_acquire)) {
        return;
    }
    int saved_errno = errno;
    if (arenas_walk()) {
        trim_if_needed();
    }
    errno = saved_errno;
    atomic_store_explicit(&state.busy, false, memory_order_release);
}

/* A request was for the parent; the counters are wiped (state.h). */
static void after_fork_in_child(void) {
    state_after_fork();
    process_begin();
    control_cancel(&os_control);
}

void governor_start(void) {
    glibc_settings_read();
    thresholds_start();
    process_begin();
    state_start();
    if (activation_start()) {
        govern(false);
    }
    if (pthread_atfork(before_fork, NULL, after_fork_in_child) != 0) {
        activation_end("no memory for fork handlers");
    }
}
