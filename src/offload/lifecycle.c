#include "offload/lifecycle.h"

#include "base/assert.h"
#include "offload/loop.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/futex.h"
#include "os/syscall.h"

#include <string.h>

#define SERVER_STACK_BYTES ((size_t)128 << 10)
/* Of a fork, to enter what an unresponsive server may have entered. */
#define FORK_TRIES 1000

static bool has_thread(const struct server *server) {
    return atomic_load_explicit(&server->thread, memory_order_acquire) == THREAD_STARTED;
}

static bool starts_are_held(void) {
    return atomic_load_explicit(&thread_start_holds, memory_order_seq_cst) > 0;
}

void server_start(struct server *server) {
    if (filters_now() == FILTERS_ADDED || starts_are_held() || os_syscall(SYS_getpid) != server->process) {
        return;
    }
    /* Not while another thread forks, whose child would have a heap in the middle of the server's work. */
    if (!lock_try(&server->fork_lock)) {
        return;
    }
    int none = THREAD_NONE;
    if (atomic_compare_exchange_strong_explicit(&server->thread, &none, THREAD_STARTED, memory_order_seq_cst,
                                                memory_order_relaxed)) {
        /* A thread that holds starts either sees that this one began, or is seen here. */
        if (starts_are_held()) {
            atomic_store_explicit(&server->thread, THREAD_NONE, memory_order_seq_cst);
        } else if (!thread_start(&server->worker, server_loop, server, SERVER_STACK_BYTES)) {
            atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_relaxed);
        }
    }
    lock_release(&server->fork_lock);
}

/* Waits until the word has another value. False if the server shows no heartbeat for the timeout. */
static bool wait_for_server(struct server *server, _Atomic(uint32_t) *word, uint32_t value,
                            uint64_t timeout_ns) {
    uint64_t heartbeat = atomic_load_explicit(&server->heartbeat, memory_order_relaxed);
    uint64_t start = clock_now_ns();
    while (atomic_load_explicit(word, memory_order_acquire) == value) {
        uint64_t now = atomic_load_explicit(&server->heartbeat, memory_order_relaxed);
        if (now != heartbeat) {
            heartbeat = now;
            start = clock_now_ns();
        } else if (clock_now_ns() - start > timeout_ns) {
            return false;
        }
        futex_wait(word, value, server->timeout_ns);
    }
    return true;
}

bool server_stop(struct server *server, uint64_t timeout_ns) {
    int none = THREAD_NONE;
    atomic_compare_exchange_strong_explicit(&server->thread, &none, THREAD_REFUSED, memory_order_acq_rel,
                                            memory_order_relaxed);
    if (!has_thread(server)) {
        return !server_is_orphaned(server);
    }
    bool waits = !server_is_held(server);
    if (waits) {
        lock_acquire(&server->fork_lock);
    }
    uint32_t none_yet = STOPPING_NONE;
    atomic_compare_exchange_strong_explicit(&server->stopping, &none_yet, STOPPING_REQUESTED,
                                            memory_order_seq_cst, memory_order_relaxed);
    server_wake_always(server);
    bool stopped = waits && wait_for_server(server, &server->stopping, STOPPING_REQUESTED, timeout_ns);
    if (waits) {
        lock_release(&server->fork_lock);
    }
    return stopped;
}

/* ---- before a fork ---- */

/* Acquires a lock for the fork, or, unless it may wait, tries to. */
static bool acquire_for_fork(struct lock *lock, bool waits) {
    lock_acquire_for_fork(lock, waits);
    for (unsigned tries = 0; tries < FORK_TRIES && !lock_is_mine(lock); tries++) {
        os_syscall(SYS_sched_yield);
        lock_acquire_for_fork(lock, false);
    }
    return lock_is_mine(lock);
}

/* Enters all endpoints. An unresponsive server may have entered one itself, or have a client wait there: such
 * an endpoint is left out. True if none is. */
static bool enter_all(struct server *server, bool waits) {
    bool all = acquire_for_fork(&server->open_lock, waits);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        all &= endpoint_enter(endpoint, waits ? ENTER_ALWAYS : FORK_TRIES);
    }
    all &= acquire_for_fork(&server->overflow.lock, waits);
    return all;
}

/* False if the server does not answer. */
static bool lifecycle_park(struct server *server) {
    if (!has_thread(server)) {
        return true;
    }
    atomic_store_explicit(&server->parking, PARKING_REQUESTED, memory_order_seq_cst);
    server_wake_always(server);
    uint32_t requested = PARKING_REQUESTED;
    return wait_for_server(server, &server->parking, PARKING_REQUESTED, server_long_timeout_ns(server)) ||
           !atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_NONE,
                                                    memory_order_seq_cst, memory_order_relaxed);
}

void server_before_fork(struct server *server, bool interrupts) {
    if (interrupts || server_interrupts_client(server)) {
        /* The child goes without the server and its heap, so that nothing need be waited for. */
        if (lock_is_mine(&server->fork_lock)) {
            lock_acquire_for_fork(&server->fork_lock, true);
        }
        return;
    }
    lock_acquire_for_fork(&server->fork_lock, true);
    bool parked = lifecycle_park(server);
    server->forks = true;
    bool all = enter_all(server, parked);
    if (!parked) {
        /* The server may be in the middle of anything. But a shared heap has its locks, and stays shared
         * while all endpoints are entered. */
        if (!all || !server_is_shared(server)) {
            atomic_store_explicit(&server->orphaned, true, memory_order_relaxed);
        }
        server_report_unresponsive(server);
    }
}

/* ---- after a fork ---- */

static void leave_all(struct server *server) {
    lock_release_after_fork(&server->overflow.lock);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        if (endpoint_is_mine(endpoint)) {
            endpoint_leave(endpoint);
        }
    }
    lock_release_after_fork(&server->open_lock);
}

/* In the child: only the forked thread exists, and what the others did is at an end. What a signal handler
 * that forked interrupted, ends there what it began. */
static void start_over(struct server *server) {
    lock_reset_in_child(&server->fork_lock);
    lock_reset_in_child(&server->open_lock);
    lock_reset_in_child(&server->mailbox.clients);
    lock_reset_in_child(&server->overflow.lock);
    thread_forget(&server->worker);
    if (filters_now() != FILTERS_ADDED) { /* after which no server starts */
        server->process = (int)os_syscall(SYS_getpid);
    }
    for (size_t i = 0; i < CALLS; i++) {
        call_free(&server->calls[i]);
    }
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        atomic_store_explicit(&endpoint->inside, 0, memory_order_relaxed);
        if (!endpoint_is_mine(endpoint)) {
            endpoint_leave(endpoint);
        }
    }
    atomic_store_explicit(&server->mailbox.ready, MAILBOX_EMPTY, memory_order_relaxed);
    atomic_store_explicit(&server->mailbox.done, 0, memory_order_relaxed);
    atomic_store_explicit(&server->state, SERVER_AWAKE, memory_order_relaxed);
    memset(server->deferred, 0, sizeof server->deferred);
    server->serve_depth = 0;
    server->poll_until_ns = 0;
    server->contention.checked_ns = 0;
    atomic_store_explicit(&server->unresponsive_from_ns, server_is_orphaned(server), memory_order_relaxed);
    if (server_is_orphaned(server)) {
        atomic_store_explicit(&server->heap_mode, HEAP_MODE_EXCLUSIVE, memory_order_relaxed);
        atomic_store_explicit(&server->thread, THREAD_REFUSED, memory_order_relaxed);
        return;
    }
    atomic_store_explicit(&server->is_reported, false, memory_order_relaxed);
    if (has_thread(server)) {
        atomic_store_explicit(&server->thread, THREAD_NONE, memory_order_relaxed);
        atomic_store_explicit(&server->operations, 0, memory_order_relaxed);
    }
    if (server_is_shared(server)) {
        bool for_good = atomic_load_explicit(&server->stopping, memory_order_relaxed) == STOPPING_STOPPED;
        server->hooks.switch_to_shared(server->hooks.context, for_good ? SHARED_FOR_GOOD : SHARED_FOREGROUND);
    } else {
        atomic_store_explicit(&server->heap_mode, HEAP_MODE_UNSET, memory_order_relaxed);
    }
}

/* Whether server_before_fork waited for the server and its clients. */
static bool has_waited(const struct server *server) {
    return lock_is_mine(&server->fork_lock) &&
           atomic_load_explicit(&server->fork_lock.state, memory_order_relaxed) < LOCK_KEPT;
}

void server_after_fork(struct server *server, bool child) {
    if (!has_waited(server)) {
        lock_release_after_fork(&server->fork_lock);
        if (child) {
            atomic_store_explicit(&server->orphaned, true, memory_order_relaxed);
            atomic_store_explicit(&server->is_reported, true, memory_order_relaxed); /* nothing to report */
            start_over(server);
        }
        return;
    }
    calm_assert(server->forks && lock_is_mine(&server->fork_lock));
    leave_all(server);
    server->forks = false;
    if (child) {
        start_over(server);
    } else if (has_thread(server)) {
        atomic_store_explicit(&server->orphaned, false, memory_order_relaxed); /* only the child was */
    }
    if (atomic_load_explicit(&server->parking, memory_order_relaxed) == PARKING_PARKED) {
        atomic_store_explicit(&server->parking, PARKING_NONE, memory_order_release);
        futex_wake_all(&server->parking);
    }
    lock_release_after_fork(&server->fork_lock);
}
