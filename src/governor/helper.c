#include "governor/helper.h"

#include "governor/probes.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/futex.h"
#include "os/syscall.h"

#define STACK_BYTES ((size_t)64 << 10)
/* Windows without work before it ends. */
#define QUIET_WINDOWS 5

#define STOP_LOOK_NS 1000000ULL

static bool change(struct governor *governor, int from, int to) {
    return atomic_compare_exchange_strong_explicit(&governor->helper, &from, to, memory_order_seq_cst,
                                                   memory_order_relaxed);
}

/* The state that it leaves behind: the first thread, alone, does well without a helper, as before there were
 * others. */
static int state_without(bool own_files) {
    return own_files && thread_count() > 2 ? HELPER_AWAY : HELPER_ALONE;
}

/*
 * True if it is to end. A thread that leaves the heap from here on finds it away, and starts another once
 * this one is gone; a thread that left before is seen in the heap's count.
 */
static bool leave(struct governor *governor, int state) {
    governor_leave_untended(governor);
    atomic_store_explicit(&governor->helper, state, memory_order_seq_cst);
    return governor_is_untouched(governor) || !change(governor, state, HELPER_RUNS);
}

/* Whether the program's first thread is alone again, and all that it keeps may stay untended. Asked for only
 * if no other came to the heap of late. */
static bool is_alone_again(struct governor *governor, bool own_files, uint64_t *looks, unsigned *windows) {
    uint64_t now = atomic_load_explicit(&governor->looks_of_others, memory_order_relaxed);
    *windows = now == *looks ? *windows + 1 : 0;
    *looks = now;
    if (*windows < QUIET_WINDOWS || !own_files) {
        return false;
    }
    *windows = 0;
    return state_without(own_files) == HELPER_ALONE && governor_keeps_little(governor);
}

static bool is_stopped(void) {
    return atomic_load_explicit(&thread_stops, memory_order_seq_cst) > 0;
}

static void tidy(struct governor *governor) {
    /* An inherited filter may know none of this. */
    bool own_files = false;
    if (filters_allow_all()) {
        own_files = thread_leave_files();
        thread_drop_capabilities();
        thread_schedule_normally(&governor->cpus);
    }
    /* What was quiet was so before its time. */
    atomic_store_explicit(&governor->quiet_windows, 0, memory_order_relaxed);
    uint64_t looks = 0;
    unsigned windows = 0;
    for (;;) {
        /* The bell is a count of rings. */
        uint32_t rung = atomic_load_explicit(&governor->helper_bell, memory_order_seq_cst);
        if (is_stopped() || is_alone_again(governor, own_files, &looks, &windows)) {
            governor_leave_untended(governor);
            atomic_store_explicit(&governor->helper, state_without(own_files), memory_order_seq_cst);
            return;
        }
        if (probe_helper_wakeup_is_heard()) {
            probe_helper_wakeup();
        }
        governor_tend(governor);
        governor_tick(governor, own_files);
        if (governor->visited != NULL) {
            governor->visited();
        }
        if (!governor_wants_helper(governor)) {
            governor_leave_untended(governor);
            atomic_store_explicit(&governor->helper, HELPER_NONE, memory_order_seq_cst);
            return;
        }
        if (atomic_load_explicit(&governor->quiet_windows, memory_order_relaxed) >= QUIET_WINDOWS &&
            leave(governor, state_without(own_files))) {
            return;
        }
        futex_wait(&governor->helper_bell, rung, WINDOW_NS);
    }
}

/* The caches are left to a lone thread as the last act: another helper starts once this one is gone. */
static void run(void *argument) {
    struct governor *governor = argument;
    tidy(governor);
    cpu_caches_without_helper(governor->caches);
}

bool helper_is_of_this_process(const struct governor *governor) {
    return os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0) == governor->process;
}

static bool start(struct governor *governor, enum helper_state seen) {
    if (!change(governor, (int)seen, HELPER_RUNS)) {
        return false;
    }
    /* Who stops it either sees that it runs, or is seen here. */
    if (is_stopped() || !helper_is_of_this_process(governor)) {
        atomic_store_explicit(&governor->helper, (int)seen, memory_order_seq_cst);
        return false;
    }
    while (!thread_is_gone(&governor->helper_thread)) {
        thread_wait(&governor->helper_thread, 0);
    }
    cpu_caches_with_helper(governor->caches);
    governor_tend(governor);
    if (!thread_start(&governor->helper_thread, run, governor, STACK_BYTES)) {
        governor_leave_untended(governor);
        cpu_caches_without_helper(governor->caches);
        atomic_store_explicit(&governor->helper, HELPER_REFUSED, memory_order_seq_cst);
        return false;
    }
    return true;
}

/* Without signals: a handler that stops the helper, or forks, would find one that runs and never comes. */
bool helper_start(struct governor *governor, enum helper_state seen) {
    if (filters_now() == FILTERS_ADDED || is_stopped()) {
        return false;
    }
    uint64_t before = thread_block_signals();
    bool started = start(governor, seen);
    thread_restore_signals(before);
    return started;
}

void helper_hold(void) {
    atomic_fetch_add_explicit(&thread_stops, 1, memory_order_seq_cst);
}

bool helper_stop(struct governor *governor, uint64_t patience_ns) {
    helper_hold();
    uint64_t start = 0;
    while (atomic_load_explicit(&governor->helper, memory_order_seq_cst) == HELPER_RUNS ||
           !thread_is_gone(&governor->helper_thread)) {
        atomic_fetch_add_explicit(&governor->helper_bell, 1, memory_order_seq_cst);
        futex_wake_all(&governor->helper_bell);
        uint64_t now = clock_now_ns();
        start = start == 0 ? now : start;
        if (now - start >= patience_ns) {
            return false;
        }
        thread_wait(&governor->helper_thread, STOP_LOOK_NS);
    }
    thread_wait_uncounted(&governor->helper_thread, patience_ns);
    return true;
}

/* In a child that was forked in between there may be none left. */
void helper_resume(void) {
    uint32_t stops = atomic_load_explicit(&thread_stops, memory_order_relaxed);
    while (stops > 0 && !atomic_compare_exchange_weak_explicit(&thread_stops, &stops, stops - 1,
                                                               memory_order_seq_cst, memory_order_relaxed)) {
    }
}

void helper_forget(struct governor *governor) {
    if (filters_now() != FILTERS_ADDED) { /* under one none is started any more */
        governor->process = (int)os_syscall(SYS_getpid, 0, 0, 0, 0, 0, 0);
    }
    thread_forget(&governor->helper_thread);
    cpu_caches_without_helper(governor->caches);
    if (is_stopped()) {
        atomic_store_explicit(&thread_stops, 0, memory_order_relaxed);
    }
    if (atomic_load_explicit(&governor->helper, memory_order_relaxed) != HELPER_NONE) {
        atomic_store_explicit(&governor->helper, HELPER_NONE, memory_order_relaxed);
    }
}
