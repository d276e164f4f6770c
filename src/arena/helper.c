#include "arena/helper.h"

#include "arena/arena_probes.h"
#include "arena/epoch.h"
#include "arena/terms.h"
#include "base/assert.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/futex.h"
#include "os/syscall.h"

/*
 * The states of the helper (enum helper_state), and the events that change the
 * state (enum helper_event):
 *
 *   state                        event          next state    made by
 *   NONE, AWAY, SINGLE, REFUSED  START          RUNS          a thread that leaves the heap and saw the state
 *   RUNS                         START_UNDONE   as before     this thread: a hold, or another process
 *   RUNS                         START_REFUSED  REFUSED       this thread: the kernel starts no thread
 *   RUNS                         STAND_DOWN     AWAY, SINGLE  the helper: it is stopped, or not needed
 *   RUNS                         SWITCH_OFF     NONE          the helper: the option background is off
 *   AWAY, SINGLE                 RETURN         RUNS          the helper: a thread came to the heap meanwhile
 *   NONE, AWAY, SINGLE, REFUSED  END            ENDED         the thread that ends the process
 *   all                          FORK           NONE          the child of a fork
 *
 * A change is a compare-and-swap, since START, RETURN and END may compete. The
 * state RUNS belongs to one thread: the thread that starts the helper, and then
 * the helper.
 * tests/model/helper.pml is a model of this protocol.
 */
enum helper_event {
    EVENT_START,
    EVENT_START_UNDONE,
    EVENT_START_REFUSED,
    EVENT_STAND_DOWN,
    EVENT_SWITCH_OFF,
    EVENT_RETURN,
    EVENT_END,
    EVENT_FORK
};

#define HELPER_SET(name) (1U << HELPER_##name)
#define IDLE_STATES      (HELPER_SET(NONE) | HELPER_SET(AWAY) | HELPER_SET(SINGLE) | HELPER_SET(REFUSED))
#define ALL_STATES       (IDLE_STATES | HELPER_SET(RUNS) | HELPER_SET(ENDED))

/* Only assertions read it. */
static const struct {
    unsigned from, to; /* sets of states */
} transitions[] __attribute__((unused)) = {
    [EVENT_START] = {IDLE_STATES, HELPER_SET(RUNS)},
    [EVENT_START_UNDONE] = {HELPER_SET(RUNS), IDLE_STATES},
    [EVENT_START_REFUSED] = {HELPER_SET(RUNS), HELPER_SET(REFUSED)},
    [EVENT_STAND_DOWN] = {HELPER_SET(RUNS), HELPER_SET(AWAY) | HELPER_SET(SINGLE)},
    [EVENT_SWITCH_OFF] = {HELPER_SET(RUNS), HELPER_SET(NONE)},
    [EVENT_RETURN] = {HELPER_SET(AWAY) | HELPER_SET(SINGLE), HELPER_SET(RUNS)},
    [EVENT_END] = {IDLE_STATES, HELPER_SET(ENDED)},
    [EVENT_FORK] = {ALL_STATES, HELPER_SET(NONE)},
};

#define HELPER_STACK_BYTES ((size_t)64 << 10)
/* The helper ends after this number of epochs without work. */
#define QUIET_EPOCHS 5

#define STOP_CHECK_NS 1000000ULL

static enum helper_state helper_now(const struct arenas *arenas) {
    return (enum helper_state)atomic_load_explicit(&arenas->helper.state, memory_order_seq_cst);
}

/* Returns false if another thread has changed the state meanwhile. */
static bool helper_change(struct arenas *arenas, enum helper_event event, enum helper_state from,
                          enum helper_state to) {
    calm_assert((transitions[event].from >> from & 1) != 0, event, from, to);
    calm_assert((transitions[event].to >> to & 1) != 0, event, from, to);
    int expected = (int)from;
    return atomic_compare_exchange_strong_explicit(&arenas->helper.state, &expected, (int)to,
                                                   memory_order_seq_cst, memory_order_seq_cst);
}

/* Only the thread that the state RUNS belongs to may call it. */
static void helper_change_from_runs(struct arenas *arenas, enum helper_event event, enum helper_state to) {
    bool changed = helper_change(arenas, event, HELPER_RUNS, to);
    calm_assert(changed, event, to);
    (void)changed;
}

/* Returns the state after the helper's end. The program's first thread needs no
 * helper once it is alone again. */
static enum helper_state state_without(bool own_files) {
    return own_files && thread_count() > 2 ? HELPER_AWAY : HELPER_SINGLE;
}

static void stand_down(struct arenas *arenas, enum helper_event event, enum helper_state state) {
    calm_assert(helper_now(arenas) == HELPER_RUNS, event, state);
    terms_stop_background(arenas);
    helper_change_from_runs(arenas, event, state);
}

/*
 * Returns true if the helper is to end. Changes the state first, and reads the
 * count of checks afterwards. A thread that leaves the heap after the change
 * sees the new state, and starts another helper once this one is gone. A thread
 * that left the heap before the change has raised the count.
 */
static bool helper_leave(struct arenas *arenas, enum helper_state state) {
    stand_down(arenas, EVENT_STAND_DOWN, state);
    return epoch_is_untouched(arenas) || !helper_change(arenas, EVENT_RETURN, state, HELPER_RUNS);
}

/* Returns whether the program's first thread is alone again, and all free
 * memory may stay without a background purge. Counts the threads only if no
 * other thread came to the heap during the last epochs. */
static bool is_single_again(struct arenas *arenas, bool own_files, uint64_t *checks, unsigned *epochs) {
    uint64_t now = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        now += atomic_load_explicit(&arena->checks_by_others, memory_order_relaxed);
    }
    *epochs = now == *checks ? *epochs + 1 : 0;
    *checks = now;
    if (*epochs < QUIET_EPOCHS || !own_files) {
        return false;
    }
    *epochs = 0;
    return state_without(own_files) == HELPER_SINGLE && epoch_keeps_little(arenas);
}

static bool is_stopped(void) {
    return atomic_load_explicit(&thread_start_holds, memory_order_seq_cst) > 0;
}

static void purge_in_background(struct arenas *arenas) {
    /* A seccomp filter that the process inherited may forbid these calls. */
    bool own_files = false;
    if (filters_allow_all()) {
        own_files = thread_leave_files();
        thread_drop_capabilities();
        thread_schedule_normally(&arenas->helper.cpus);
    }
    atomic_store_explicit(&arenas->helper.quiet_epochs, 0, memory_order_relaxed);
    uint64_t checks = 0;
    unsigned epochs = 0;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&arenas->helper.wakeup, memory_order_seq_cst);
        if (is_stopped() || is_single_again(arenas, own_files, &checks, &epochs)) {
            stand_down(arenas, EVENT_STAND_DOWN, state_without(own_files));
            return;
        }
        if (probe_helper_wakeup_is_enabled()) {
            probe_helper_wakeup();
        }
        terms_start_background(arenas);
        epoch_advance(arenas, own_files);
        if (arenas->visited != NULL) {
            arenas->visited();
        }
        if (!helper_is_wanted(arenas)) {
            stand_down(arenas, EVENT_SWITCH_OFF, HELPER_NONE);
            return;
        }
        if (atomic_load_explicit(&arenas->helper.quiet_epochs, memory_order_relaxed) >= QUIET_EPOCHS &&
            helper_leave(arenas, state_without(own_files))) {
            return;
        }
        futex_wait(&arenas->helper.wakeup, seen, DEMAND_EPOCH_NS);
    }
}

/* By its last call the helper lets the program's only thread omit the caches'
 * locks. Another helper starts only once this one is gone. */
static void helper_run(void *argument) {
    struct arenas *arenas = argument;
    purge_in_background(arenas);
    cpu_caches_set_helper(arenas->caches, false);
}

bool helper_exists(const struct arenas *arenas) {
    return arena_has_helper(arenas);
}

bool helper_is_of_this_process(const struct arenas *arenas) {
    return os_syscall(SYS_getpid) == arenas->helper.process;
}

static bool helper_launch(struct arenas *arenas, enum helper_state seen) {
    if (!helper_change(arenas, EVENT_START, seen, HELPER_RUNS)) {
        return false;
    }
    /* A thread that stops helpers sees the state RUNS, or this thread sees that
     * helpers are stopped. */
    if (is_stopped() || !helper_is_of_this_process(arenas)) {
        helper_change_from_runs(arenas, EVENT_START_UNDONE, seen);
        return false;
    }
    while (!thread_is_gone(&arenas->helper.thread)) {
        thread_wait(&arenas->helper.thread, 0);
    }
    calm_assert(thread_is_gone(&arenas->helper.thread));
    cpu_caches_set_helper(arenas->caches, true);
    terms_start_background(arenas);
    if (!thread_start(&arenas->helper.thread, helper_run, arenas, HELPER_STACK_BYTES)) {
        terms_stop_background(arenas);
        cpu_caches_set_helper(arenas->caches, false);
        helper_change_from_runs(arenas, EVENT_START_REFUSED, HELPER_REFUSED);
        return false;
    }
    return true;
}

/* Signals are blocked, since a handler that stops the helper or forks would
 * wait for a start that it has interrupted. */
bool helper_start(struct arenas *arenas, enum helper_state seen) {
    if (filters_now() == FILTERS_ADDED || is_stopped()) {
        return false;
    }
    uint64_t before = thread_block_signals();
    bool started = helper_launch(arenas, seen);
    thread_set_signals(before);
    return started;
}

void helper_hold(void) {
    atomic_fetch_add_explicit(&thread_start_holds, 1, memory_order_seq_cst);
}

bool helper_stop(struct arenas *arenas, uint64_t timeout_ns) {
    helper_hold();
    uint64_t start = 0;
    /* This thread reads the state first. A start that it does not see as RUNS
     * either sees the hold, or has started the helper already. */
    while (helper_now(arenas) == HELPER_RUNS || !thread_is_gone(&arenas->helper.thread)) {
        atomic_fetch_add_explicit(&arenas->helper.wakeup, 1, memory_order_seq_cst);
        futex_wake_all(&arenas->helper.wakeup);
        if (clock_has_passed(&start, timeout_ns)) {
            return false;
        }
        thread_wait(&arenas->helper.thread, STOP_CHECK_NS);
    }
    thread_wait_uncounted(&arenas->helper.thread, timeout_ns);
    return true;
}

/* In a child that was forked between hold and resume, the count may be zero. */
void helper_resume(void) {
    uint32_t stops = atomic_load_explicit(&thread_start_holds, memory_order_relaxed);
    while (stops > 0 && !atomic_compare_exchange_weak_explicit(&thread_start_holds, &stops, stops - 1,
                                                               memory_order_seq_cst, memory_order_relaxed)) {
    }
}

void helper_forget(struct arenas *arenas) {
    /* A filter that the program has added excludes helpers, and may not know
     * the call. */
    if (filters_now() != FILTERS_ADDED) {
        arenas->helper.process = (int)os_syscall(SYS_getpid);
    }
    thread_forget(&arenas->helper.thread);
    cpu_caches_set_helper(arenas->caches, false);
    if (is_stopped()) {
        atomic_store_explicit(&thread_start_holds, 0, memory_order_relaxed);
    }
    if (helper_now(arenas) != HELPER_NONE) { /* an unchanged page stays shared with the parent */
        helper_change(arenas, EVENT_FORK, helper_now(arenas), HELPER_NONE);
    }
}

bool helper_is_wanted(const struct arenas *arenas) {
    return setting_value(&arenas->settings.background) != 0;
}

void helper_end(struct arenas *arenas) {
    enum helper_state seen;
    do {
        seen = helper_now(arenas);
    } while (seen != HELPER_RUNS && seen != HELPER_ENDED &&
             !helper_change(arenas, EVENT_END, seen, HELPER_ENDED));
}
