#include "offload/lifecycle.h"

#include "base/assert.h"
#include "offload/loop.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/syscall.h"

#include <string.h>

#define SERVER_STACK_BYTES ((size_t)128 << 10)
/* A process that works on the heap less often is not worth a thread. */
#define MIN_OPERATIONS 64
#define STOP_CHECK_NS  1000000ULL
/* How long a fork waits for a thread in an endpoint: a second. */
#define FORK_NAPS 20000

static int thread_state(const struct server *server) {
    return atomic_load_explicit(&server->words.thread, memory_order_acquire);
}

static bool change_thread(struct server *server, int from, int to) {
    return atomic_compare_exchange_strong_explicit(&server->words.thread, &from, to, memory_order_seq_cst,
                                                   memory_order_relaxed);
}

/* Signals are blocked: a handler that stops the server, or forks, would wait
 * for one that never starts. */
static void server_start(struct server *server) {
    struct server_locked *locked = &server->locked;
    if (filters_now() == FILTERS_ADDED || server_is_stopped(server) ||
        os_syscall(SYS_getpid) != locked->process || !thread_is_gone(&locked->worker)) {
        return;
    }
    uint64_t signals = thread_block_signals();
    if (lock_try(&server->lock)) { /* not while another thread forks */
        if (thread_is_gone(&locked->worker) && change_thread(server, THREAD_NONE, THREAD_STARTED)) {
            /* A thread that holds starts either sees that this one began, or is
             * seen here. */
            if (server_is_stopped(server)) {
                change_thread(server, THREAD_STARTED, THREAD_NONE);
            } else if (!thread_start(&locked->worker, server_loop, server, SERVER_STACK_BYTES)) {
                change_thread(server, THREAD_STARTED, THREAD_REFUSED);
            }
        }
        lock_release(&server->lock);
    }
    thread_set_signals(signals);
}

void server_note_operation(struct server *server) {
    if (thread_state(server) != THREAD_NONE) {
        return;
    }
    uint32_t operations = atomic_load_explicit(&server->words.operations, memory_order_relaxed);
    if (operations < MIN_OPERATIONS) {
        atomic_store_explicit(&server->words.operations, operations + 1, memory_order_relaxed);
    } else {
        server_start(server);
    }
}

bool server_stop(struct server *server, uint64_t timeout_ns) {
    struct thread *worker = &server->locked.worker;
    uint64_t start = 0;
    while (thread_state(server) == THREAD_STARTED || !thread_is_gone(worker)) {
        server_wake_always(server);
        if (clock_has_passed(&start, timeout_ns)) {
            return false;
        }
        thread_wait(worker, STOP_CHECK_NS);
    }
    thread_wait_uncounted(worker, timeout_ns);
    return true;
}

/* ---- forks ---- */

bool server_before_fork(struct server *server, bool interrupts) {
    if (lock_is_mine(&server->lock)) {
        /* A signal handler forks, within a fork or as this thread serves: and
         * so it does in the child. */
        lock_acquire_for_fork(&server->lock, true);
    } else if (interrupts || !server_enter(server, server_long_timeout_ns(server), true)) {
        return false;
    }
    if (server->locked.forks++ == 0) {
        lock_acquire_for_fork(&server->opening, true);
        struct endpoint *endpoint = server_endpoints(server);
        for (; endpoint != NULL; endpoint = endpoint->next) {
            endpoint_enter_for_fork(endpoint, FORK_NAPS);
        }
    }
    return true;
}

static void release_server(struct server *server) {
    calm_assert(server->locked.forks > 0 && lock_is_mine(&server->lock));
    if (--server->locked.forks == 0) {
        struct endpoint *endpoint = server_endpoints(server);
        for (; endpoint != NULL; endpoint = endpoint->next) {
            endpoint_leave_after_fork(endpoint);
        }
        lock_release_after_fork(&server->opening);
    }
    lock_release_after_fork(&server->lock);
}

void server_after_fork_in_parent(struct server *server, bool held) {
    if (held) {
        release_server(server);
    }
}

/* Another thread may have been about to add an endpoint to the list. */
static void relink_endpoints(struct server *server) {
    struct endpoint *last = NULL;
    for (unsigned i = 0; i < server->setup.endpoint_count; i++) {
        struct endpoint *endpoint = server_endpoint(server, i);
        if (endpoint != NULL) {
            endpoint->next = last;
            last = endpoint;
        }
    }
    atomic_store_explicit(&server->words.last_opened, last, memory_order_relaxed);
}

/* What other threads did with the mailbox is at an end. A client on this thread
 * that a signal handler interrupted finds its request cancelled. */
static void reset_mailbox(struct mailbox *mailbox) {
    bool mine = lock_is_mine(&mailbox->clients);
    bool waits = mine && atomic_load_explicit(&mailbox->done, memory_order_relaxed) == 0;
    if (!mine) {
        lock_reset_in_child(&mailbox->clients);
        atomic_store_explicit(&mailbox->done, 0, memory_order_relaxed);
    }
    atomic_store_explicit(&mailbox->ready, waits ? MAILBOX_CANCELLED : MAILBOX_EMPTY, memory_order_relaxed);
}

static void reset_endpoints(struct server *server, bool held) {
    if (!held) {
        relink_endpoints(server);
    }
    struct endpoint *endpoint = server_endpoints(server);
    for (; endpoint != NULL; endpoint = endpoint->next) {
        uint64_t entered = atomic_load_explicit(&endpoint->entered, memory_order_relaxed);
        bool mine = (entered & ~(uint64_t)ENTERED_FOR_FORK) == lock_self();
        /* Another thread may have been in the middle of a change. */
        if (!mine && (!held || entered != 0)) {
            endpoint_forget(endpoint);
        }
        atomic_store_explicit(&endpoint->hits, 0, memory_order_relaxed);
        atomic_store_explicit(&endpoint->misses, 0, memory_order_relaxed);
    }
}

void server_start_child(struct server *server, bool held) {
    struct server_words *words = &server->words;
    if (filters_now() != FILTERS_ADDED) { /* after which no server starts */
        server->locked.process = (int)os_syscall(SYS_getpid);
    }
    if (!held) {
        lock_reset_in_child(&server->lock);
        lock_reset_in_child(&server->opening);
        server->locked.forks = 0;
    }
    calls_start_child(server->calls);
    atomic_store_explicit(&words->claims, 0, memory_order_relaxed);
    if (thread_state(server) == THREAD_STARTED || !thread_is_gone(&server->locked.worker)) {
        thread_forget(&server->locked.worker);
        change_thread(server, THREAD_STARTED, THREAD_NONE);
        atomic_store_explicit(&words->serves, false, memory_order_relaxed);
        atomic_store_explicit(&words->has_leftovers, true, memory_order_relaxed);
        atomic_store_explicit(&words->state, SERVER_AWAKE, memory_order_relaxed);
        atomic_store_explicit(&words->operations, 0, memory_order_relaxed);
        memset(&server->counts, 0, sizeof server->counts);
        reset_mailbox(&server->mailbox);
        reset_endpoints(server, held);
    }
    if (held) {
        release_server(server);
    }
}
