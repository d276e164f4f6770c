#include "governor/helper.h"

#include "base/assert.h"
#include "governor/epoch.h"
#include "governor/probes.h"
#include "governor/terms.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/futex.h"
#include "os/syscall.h"

#define HELPER_STACK_BYTES ((size_t)64 << 10)
/* Epochs without work before it ends. */
#define QUIET_EPOCHS 5

#define STOP_CHECK_NS 1000000ULL

static bool helper_change(struct governor *governor, int from, int to) {
    calm_assert(from != to, from);
    return atomic_compare_exchange_strong_explicit(&governor->helper, &from, to, memory_order_seq_cst,
                                                   memory_order_relaxed);
}

/* The state after it ended: the first thread, alone, needs no helper, as before there were other threads. */
static int state_without(bool own_files) {
    return own_files && thread_count() > 2 ? HELPER_AWAY : HELPER_ALONE;
}

static void stand_down(struct governor *governor, int state) {
    calm_assert(state != HELPER_RUNS && atomic_load(&governor->helper) == HELPER_RUNS, state);
    governor_stop_background(governor);
    atomic_store_explicit(&governor->helper, state, memory_order_seq_cst);
}

/*
 * True if the helper is to end. A thread that leaves the heap from here on finds the helper away, and starts
 * another once this one is gone; a thread that left before is seen in the count of checks.
 */
static bool helper_leave(struct governor *governor, int state) {
    stand_down(governor, state);
    return governor_is_untouched(governor) || !helper_change(governor, state, HELPER_RUNS);
}

/* Whether the program's first thread is alone again, and all free memory may stay without a background purge.
 * Examined only if no other thread came to the heap during the last epochs. */
static bool is_alone_again(struct governor *governor, bool own_files, uint64_t *checks, unsigned *epochs) {
    uint64_t now = atomic_load_explicit(&governor->checks_by_others, memory_order_relaxed);
    *epochs = now == *checks ? *epochs + 1 : 0;
    *checks = now;
    if (*epochs < QUIET_EPOCHS || !own_files) {
        return false;
    }
    *epochs = 0;
    return state_without(own_files) == HELPER_ALONE && governor_keeps_little(governor);
}

static bool is_stopped(void) {
    return atomic_load_explicit(&thread_start_holds, memory_order_seq_cst) > 0;
}

static void purge_in_background(struct governor *governor) {
    /* An inherited seccomp filter may forbid these calls. */
    bool own_files = false;
    if (filters_allow_all()) {
        own_files = thread_leave_files();
        thread_drop_capabilities();
        thread_schedule_normally(&governor->cpus);
    }
    atomic_store_explicit(&governor->quiet_epochs, 0, memory_order_relaxed);
    uint64_t checks = 0;
    unsigned epochs = 0;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&governor->helper_wakeup, memory_order_seq_cst);
        if (is_stopped() || is_alone_again(governor, own_files, &checks, &epochs)) {
            stand_down(governor, state_without(own_files));
            return;
        }
        if (probe_helper_wakeup_is_enabled()) {
            probe_helper_wakeup();
        }
        governor_start_background(governor);
        governor_tick(governor, own_files);
        if (governor->visited != NULL) {
            governor->visited();
        }
        if (!governor_wants_helper(governor)) {
            stand_down(governor, HELPER_NONE);
            return;
        }
        if (atomic_load_explicit(&governor->quiet_epochs, memory_order_relaxed) >= QUIET_EPOCHS &&
            helper_leave(governor, state_without(own_files))) {
            return;
        }
        futex_wait(&governor->helper_wakeup, seen, DEMAND_EPOCH_NS);
    }
}

/* Leaves the caches to a lone thread as its last act: another helper starts once this one is gone. */
static void helper_run(void *argument) {
    struct governor *governor = argument;
    purge_in_background(governor);
    cpu_caches_set_helper(governor->caches, false);
}

bool helper_is_of_this_process(const struct governor *governor) {
    return os_syscall(SYS_getpid) == governor->process;
}

static bool helper_launch(struct governor *governor, enum helper_state seen) {
    if (!helper_change(governor, (int)seen, HELPER_RUNS)) {
        return false;
    }
    /* A thread that stops helpers either sees that this one runs, or is seen here. */
    if (is_stopped() || !helper_is_of_this_process(governor)) {
        atomic_store_explicit(&governor->helper, (int)seen, memory_order_seq_cst);
        return false;
    }
    while (!thread_is_gone(&governor->helper_thread)) {
        thread_wait(&governor->helper_thread, 0);
    }
    calm_assert(thread_is_gone(&governor->helper_thread));
    cpu_caches_set_helper(governor->caches, true);
    governor_start_background(governor);
    if (!thread_start(&governor->helper_thread, helper_run, governor, HELPER_STACK_BYTES)) {
        governor_stop_background(governor);
        cpu_caches_set_helper(governor->caches, false);
        atomic_store_explicit(&governor->helper, HELPER_REFUSED, memory_order_seq_cst);
        return false;
    }
    return true;
}

/* Signals are blocked: a handler that stops the helper, or forks, would wait for one that never starts. */
bool helper_start(struct governor *governor, enum helper_state seen) {
    if (filters_now() == FILTERS_ADDED || is_stopped()) {
        return false;
    }
    uint64_t before = thread_block_signals();
    bool started = helper_launch(governor, seen);
    thread_set_signals(before);
    return started;
}

void helper_hold(void) {
    atomic_fetch_add_explicit(&thread_start_holds, 1, memory_order_seq_cst);
}

bool helper_stop(struct governor *governor, uint64_t timeout_ns) {
    helper_hold();
    uint64_t start = 0;
    while (atomic_load_explicit(&governor->helper, memory_order_seq_cst) == HELPER_RUNS ||
           !thread_is_gone(&governor->helper_thread)) {
        atomic_fetch_add_explicit(&governor->helper_wakeup, 1, memory_order_seq_cst);
        futex_wake_all(&governor->helper_wakeup);
        if (clock_has_passed(&start, timeout_ns)) {
            return false;
        }
        thread_wait(&governor->helper_thread, STOP_CHECK_NS);
    }
    thread_wait_uncounted(&governor->helper_thread, timeout_ns);
    return true;
}

/* A child that was forked between hold and resume may find the count at zero. */
void helper_resume(void) {
    uint32_t stops = atomic_load_explicit(&thread_start_holds, memory_order_relaxed);
    while (stops > 0 && !atomic_compare_exchange_weak_explicit(&thread_start_holds, &stops, stops - 1,
                                                               memory_order_seq_cst, memory_order_relaxed)) {
    }
}

void helper_forget(struct governor *governor) {
    if (filters_now() != FILTERS_ADDED) { /* after which no helper starts */
        governor->process = (int)os_syscall(SYS_getpid);
    }
    thread_forget(&governor->helper_thread);
    cpu_caches_set_helper(governor->caches, false);
    if (is_stopped()) {
        atomic_store_explicit(&thread_start_holds, 0, memory_order_relaxed);
    }
    if (atomic_load_explicit(&governor->helper, memory_order_relaxed) != HELPER_NONE) {
        atomic_store_explicit(&governor->helper, HELPER_NONE, memory_order_relaxed);
    }
}

bool governor_wants_helper(const struct governor *governor) {
    return setting_value(&governor->settings.background) != 0;
}

void governor_end(struct governor *governor) {
    int helper = atomic_load_explicit(&governor->helper, memory_order_seq_cst);
    while (helper != HELPER_RUNS && helper != HELPER_ELSEWHERE &&
           !atomic_compare_exchange_weak_explicit(&governor->helper, &helper, HELPER_ELSEWHERE,
                                                  memory_order_seq_cst, memory_order_seq_cst)) {
    }
}
