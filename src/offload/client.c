#include "offload/client.h"

#include "offload/client_cache.h"
#include "offload/heap_mode.h"
#include "offload/lifecycle.h"
#include "offload/prefill_queue.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#include <string.h>

/* A client polls for its answer for so long before it sleeps: the server has a CPU to itself, and a sleep and
 * a wakeup take nearly as long. */
#define SPIN_NS 60000ULL
#define SPINS   16 /* between two checks of the clock */
/* A process that works on the heap less often is not worth a thread. */
#define MIN_OPERATIONS 64
/* Between two tries to send a call while the ring is full. */
#define FULL_NS 50000ULL
/* Other endpoints that a client tries when another thread has entered its own. */
#define TRIES 4

/* ---- endpoints ---- */

/* Whether the server can be asked at all. */
static enum answer check_server(struct server *server) {
    if (atomic_load_explicit(&server->heap_mode, memory_order_acquire) == HEAP_MODE_UNSET) {
        server_begin(server);
    }
    return server_is_shared(server)                                      ? ANSWER_SHARED
           : server_forks_here(server) || server_is_unresponsive(server) ? ANSWER_UNRESPONSIVE
                                                                         : ANSWER_DONE;
}

/* The number of an open endpoint: 0, which always is, where memory is short. */
static unsigned open_number(struct server *server, unsigned number) {
    number %= server->endpoint_count;
    return server_is_open(server, number) || server_open(server, number) ? number : 0;
}

/* Enters the endpoint of that number or one next to it, or waits for the first. NULL if the heap is in shared
 * mode; it is in exclusive mode until the caller leaves. */
static struct endpoint *enter(struct server *server, unsigned number) {
    number = open_number(server, number);
    struct endpoint *endpoint = NULL;
    for (unsigned i = 0; i < TRIES && i < server->endpoint_count && endpoint == NULL; i++) {
        unsigned other = (number + i) % server->endpoint_count;
        if (server_is_open(server, other) && endpoint_try(server_endpoint(server, other))) {
            endpoint = server_endpoint(server, other);
        }
    }
    if (endpoint == NULL) {
        endpoint = server_endpoint(server, number);
        endpoint_enter(endpoint);
    }
    if (server_is_shared(server)) {
        endpoint_leave(endpoint);
        return NULL;
    }
    return endpoint;
}

struct endpoint *client_enter_shared(struct server *server, unsigned number) {
    struct endpoint *endpoint = server_endpoint(server, open_number(server, number));
    if (!heap_mode_enter(server, endpoint)) {
        return NULL;
    }
    if (atomic_load_explicit(&server->thread, memory_order_relaxed) == THREAD_NONE &&
        atomic_fetch_add_explicit(&server->operations, 1, memory_order_relaxed) >= MIN_OPERATIONS) {
        server_start(server);
    }
    return endpoint;
}

void client_leave_shared(struct endpoint *endpoint) {
    heap_mode_leave(endpoint);
}

/* ---- frees ---- */

/* Where the overflow is full, a server that takes from it makes room. Blocks for which no server does so
 * within the timeout stay in use for good. */
static void overflow(struct server *server, void *const *blocks, size_t count) {
    uint64_t start = 0;
    while (!overflow_push(&server->overflow, blocks, count) && !server_forks_here(server)) {
        if (clock_has_passed(&start, server->timeout_ns)) {
            return;
        }
        server_wake(server);
        os_syscall(SYS_sched_yield);
    }
}

/* Whether, with so many bytes more, too much waits in the ring to leave the server asleep. */
static bool is_backlog(struct endpoint *endpoint, size_t bytes) {
    endpoint->sent_bytes += bytes;
    if (endpoint->sent_bytes - endpoint->served_seen > MAX_BACKLOG_BYTES) {
        endpoint->served_seen = atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed);
    }
    return endpoint->sent_bytes - endpoint->served_seen > MAX_BACKLOG_BYTES;
}

/* Freed blocks. class 0: a large one. `bytes` is their size, `payload` the record's. False if the heap is in
 * shared mode. */
static bool put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count,
                size_t bytes, uint64_t header, const uint64_t *payload) {
    if (server_forks_here(server) && !server_is_shared(server)) { /* it has entered all endpoints */
        overflow(server, blocks, count);
        return true;
    }
    struct endpoint *endpoint = check_server(server) == ANSWER_SHARED ? NULL : enter(server, number);
    if (endpoint == NULL) {
        return false;
    }
    if (class != 0 && client_cache_push(&server->layout, endpoint, class, blocks, count)) {
        endpoint_leave(endpoint);
        return true;
    }
    bool urgent = is_backlog(endpoint, bytes);
    bool sent = ring_push(&endpoint->ring, header, payload, record_count(header), urgent);
    endpoint->sent_bytes -= sent ? 0 : bytes;
    endpoint_leave(endpoint);
    if (!sent) {
        overflow(server, blocks, count);
    }
    if (urgent || !sent) {
        server_wake(server);
    }
    return true;
}

bool client_put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count) {
    return put(server, number, class, blocks, count, count * server->layout.classes->of[class].size,
               record_header(RECORD_FREE, class, count), (const uint64_t *)(const void *)blocks);
}

bool client_put_large(struct server *server, unsigned number, void *block, size_t bytes) {
    const uint64_t payload[] = {(uintptr_t)block, bytes};
    return put(server, number, 0, &block, 1, bytes, record_header(RECORD_FREE_LARGE, 0, 2), payload);
}

/* ---- calls ---- */

static uint64_t timeout_ns(const struct server *server, const struct call *call) {
    return call->kind == CALL_LONG ? server_long_timeout_ns(server) : server->timeout_ns;
}

/* A slot, after a wait if more threads call than there are slots; NULL if that takes too long. */
static struct call *claim(struct server *server, unsigned from) {
    _Atomic(uint32_t) *state = &server->calls[from % CALLS].state;
    struct call *call;
    uint64_t start = 0;
    while ((call = call_claim(server->calls, from)) == NULL &&
           !clock_has_passed(&start, server->timeout_ns)) {
        futex_wait(state, atomic_load_explicit(state, memory_order_relaxed), FULL_NS);
    }
    return call;
}

/* ANSWER_UNRESPONSIVE if the ring had no room until the timeout. */
static enum answer send_call(struct server *server, unsigned number, struct call *call) {
    enum record record = call->kind == CALL_LONG ? RECORD_LONG_CALL : RECORD_CALL;
    uint64_t header = record_header(record, (uint32_t)(call - server->calls), 0);
    uint64_t start = 0;
    for (;;) {
        struct endpoint *endpoint = enter(server, number);
        if (endpoint == NULL) {
            return ANSWER_SHARED;
        }
        bool sent = ring_push(&endpoint->ring, header, NULL, 0, true);
        endpoint_leave(endpoint);
        server_wake(server);
        if (sent) {
            return ANSWER_DONE;
        }
        if (clock_has_passed(&start, timeout_ns(server, call))) {
            return ANSWER_UNRESPONSIVE;
        }
        futex_wait(&call->state, CALL_PENDING, FULL_NS);
    }
}

/* Until the call is done. False if it was abandoned. */
static bool wait_for(struct server *server, struct call *call) {
    uint64_t start = clock_now_ns();
    do {
        for (int spins = 0; spins < SPINS; spins++) {
            if ((atomic_load_explicit(&call->state, memory_order_acquire) & CALL_STATE) == CALL_DONE) {
                return true;
            }
            cpu_relax();
        }
    } while (clock_now_ns() - start < SPIN_NS);
    server_wake_always(server);
    uint64_t heartbeat = atomic_load_explicit(&server->heartbeat, memory_order_relaxed);
    for (;;) {
        uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
        if ((state & CALL_STATE) == CALL_DONE) {
            return true;
        }
        if ((state & CALL_STATE) == CALL_FREE) {
            return false; /* the waiting thread forked, in a signal handler, and this is the child */
        }
        if ((state & CALL_SLEEPING) == 0 &&
            !atomic_compare_exchange_strong_explicit(&call->state, &state, state | CALL_SLEEPING,
                                                     memory_order_relaxed, memory_order_relaxed)) {
            continue;
        }
        uint64_t waited = clock_now_ns() - start;
        if (waited >= timeout_ns(server, call)) {
            uint64_t now = atomic_load_explicit(&server->heartbeat, memory_order_relaxed);
            if (call_runs_work(call) && now != heartbeat) {
                heartbeat = now;
                start += waited;
                continue;
            }
            if (call_abandon(call)) {
                return false;
            }
            waited = 0; /* a call that cannot be abandoned */
            start = clock_now_ns();
        }
        futex_wait(&call->state, state | CALL_SLEEPING, timeout_ns(server, call) - waited);
    }
}

/* Sends a call whose slot is filled, and waits. */
static enum answer have_served(struct server *server, unsigned number, struct call *call) {
    atomic_store_explicit(&call->state, CALL_PENDING, memory_order_release);
    /* A call that could not be sent may still be served, for an old record that names its slot. */
    enum answer sent = send_call(server, number, call);
    if ((sent == ANSWER_DONE || !call_retract(call)) && wait_for(server, call)) {
        return ANSWER_DONE;
    }
    /* The server may have the heap back since: then it is asked again. */
    if (sent == ANSWER_SHARED || server_is_shared(server)) {
        return ANSWER_SHARED;
    }
    server_mark_unresponsive(server);
    return ANSWER_UNRESPONSIVE;
}

/* ---- allocations ---- */

/* Leaves the endpoint. If the client took the last of a queue: wakes a sleeping server to fill it before the
 * next client misses, which would have to wait. */
static void leave_queue(struct server *server, struct endpoint *endpoint, uint32_t queue, bool took) {
    bool wakes = took && atomic_load_explicit(&server->state, memory_order_relaxed) == SERVER_SLEEPS &&
                 prefill_queue_is_empty(&server->layout, endpoint, queue);
    endpoint_leave(endpoint);
    if (wakes) {
        server_wake(server);
    }
}

enum answer client_take(struct server *server, unsigned number, uint32_t class, void **blocks, size_t count,
                        size_t *got) {
    *got = 0;
    enum answer answer = check_server(server);
    if (answer == ANSWER_SHARED || server_forks_here(server)) {
        return answer;
    }
    struct endpoint *endpoint = enter(server, number);
    if (endpoint == NULL) {
        return ANSWER_SHARED;
    }
    *got = client_cache_pop(&server->layout, endpoint, class, blocks, count);
    bool cached = *got > 0;
    *got = cached ? *got : prefill_queue_take(&server->layout, endpoint, class, blocks, count);
    leave_queue(server, endpoint, class, !cached && *got > 0);
    if (*got > 0) {
        return ANSWER_DONE;
    }
    struct call *call = answer == ANSWER_DONE ? claim(server, number) : NULL;
    if (call == NULL) {
        return ANSWER_UNRESPONSIVE;
    }
    call->kind = CALL_BLOCKS;
    call->class = class;
    call->count = count;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        memcpy(blocks, call->blocks, call->count * sizeof *blocks);
        *got = call->count;
        call_free(call);
    }
    return answer;
}

enum answer client_take_large(struct server *server, unsigned number, size_t pages, size_t align_pages,
                              unsigned flags, void **block, bool *zero) {
    *block = NULL;
    enum answer answer = check_server(server);
    if (answer == ANSWER_SHARED || server_forks_here(server)) {
        return answer;
    }
    if (align_pages <= 1) {
        struct endpoint *endpoint = enter(server, number);
        if (endpoint == NULL) {
            return ANSWER_SHARED;
        }
        *block = prefill_queue_take_large(endpoint, pages, zero);
        leave_queue(server, endpoint, prefill_queue_of_pages(pages), *block != NULL);
        if (*block != NULL) {
            return ANSWER_DONE;
        }
    }
    struct call *call = answer == ANSWER_DONE ? claim(server, number) : NULL;
    if (call == NULL) {
        return ANSWER_UNRESPONSIVE;
    }
    call->kind = CALL_LARGE;
    call->pages = pages;
    call->align_pages = align_pages;
    call->flags = flags;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        *block = call->block;
        *zero = call->zero;
        call_free(call);
    }
    return answer;
}

enum answer client_run(struct server *server, unsigned number, enum call_kind kind,
                       void (*work)(void *subject), void *subject) {
    enum answer answer = check_server(server);
    bool asks = answer == ANSWER_DONE || (answer == ANSWER_UNRESPONSIVE && kind == CALL_LONG &&
                                          !server_is_orphaned(server) && !server_forks_here(server));
    struct call *call = asks ? claim(server, number) : NULL;
    if (call == NULL) {
        return answer == ANSWER_SHARED ? answer : ANSWER_UNRESPONSIVE;
    }
    call->kind = kind;
    call->work = work;
    call->subject = subject;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        call_free(call);
    }
    return answer;
}

struct endpoint_sums client_counts(const struct server *server) {
    struct endpoint_sums sum = {0};
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        const struct endpoint_counts *counts = &server_open_endpoint(server, i)->counts;
        sum.hits += atomic_load_explicit(&counts->hits, memory_order_relaxed);
        sum.misses += atomic_load_explicit(&counts->misses, memory_order_relaxed);
    }
    return sum;
}
