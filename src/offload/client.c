#include "offload/client.h"

#include "offload/client_cache.h"
#include "offload/heap_mode.h"
#include "offload/lifecycle.h"
#include "offload/prefill_queue.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

/* A client polls for its answer for so long before it sleeps: the server has a CPU to itself, and a sleep and
 * a wakeup take nearly as long. */
#define SPIN_NS    60000ULL
#define CALL_SPINS 16 /* between two checks of the clock */
/* A process that works on the heap less often is not worth a thread. */
#define MIN_OPERATIONS 64
/* Between two tries to send a call while the ring is full. */
#define FULL_NS 50000ULL
/* Endpoints that a client tries, its own first, before it waits for that. */
#define TRIES 4

/* ---- endpoints ---- */

enum answer client_check(struct server *server) {
    if (atomic_load_explicit(&server->heap_mode, memory_order_acquire) == HEAP_MODE_UNSET) {
        heap_mode_begin(server);
    }
    return server_is_shared(server)                                      ? ANSWER_SHARED
           : server_forks_here(server) || server_is_unresponsive(server) ? ANSWER_UNRESPONSIVE
                                                                         : ANSWER_DONE;
}

/* Enters the endpoint of that number or one next to it, or waits for the first. NULL if the heap is in shared
 * mode; it is in exclusive mode until the caller leaves. */
static struct endpoint *client_enter(struct server *server, unsigned number) {
    struct endpoint *own = server_open(server, number);
    struct endpoint *entered = NULL;
    for (unsigned i = 0; i < TRIES && entered == NULL; i++) {
        struct endpoint *other = server_endpoint(server, (number + i) % server->endpoint_count);
        entered = other != NULL && endpoint_try(other) ? other : NULL;
    }
    if (entered == NULL) {
        endpoint_enter(own, ENTER_ALWAYS);
        entered = own;
    }
    if (server_is_shared(server)) {
        endpoint_leave(entered);
        return NULL;
    }
    return entered;
}

struct endpoint *client_enter_shared(struct server *server, unsigned number) {
    struct endpoint *endpoint = server_open(server, number);
    atomic_fetch_add_explicit(&endpoint->inside, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&server->heap_mode, memory_order_seq_cst) != HEAP_MODE_SHARED) {
        client_leave_shared(endpoint);
        return NULL;
    }
    atomic_store_explicit(&endpoint->last_inside, lock_self(), memory_order_relaxed);
    if (atomic_load_explicit(&server->thread, memory_order_relaxed) == THREAD_NONE &&
        atomic_fetch_add_explicit(&server->operations, 1, memory_order_relaxed) >= MIN_OPERATIONS) {
        server_start(server);
    }
    return endpoint;
}

void client_leave_shared(struct endpoint *endpoint) {
    atomic_fetch_sub_explicit(&endpoint->inside, 1, memory_order_release);
}

/* ---- frees ---- */

/* Where the overflow is full, a server that takes from it makes room. Blocks for which no server does so
 * within the timeout stay in use for good. */
static void client_overflow(struct server *server, void *const *blocks, size_t count) {
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

static bool push_freed(struct endpoint *endpoint, const struct request *request, bool urgent) {
    uint32_t class = request->class;
    const uint64_t large[] = {(uintptr_t)request->blocks[0], request->bytes};
    const uint64_t *payload = class != 0 ? (const uint64_t *)(const void *)request->blocks : large;
    uint64_t header = record_header(REQUEST_PUT, class, class != 0 ? request->count : 2);
    return ring_push(&endpoint->ring, header, payload, urgent);
}

static enum answer client_put(struct server *server, unsigned number, const struct request *request) {
    uint32_t class = request->class;
    if (server_forks_here(server) && !server_is_shared(server)) { /* it has entered all endpoints */
        client_overflow(server, request->blocks, request->count);
        return ANSWER_DONE;
    }
    struct endpoint *endpoint = client_check(server) == ANSWER_SHARED ? NULL : client_enter(server, number);
    if (endpoint == NULL) {
        return ANSWER_SHARED;
    }
    if (class != 0 && client_cache_push(endpoint, class, request->blocks, request->count)) {
        endpoint_leave(endpoint);
        return ANSWER_DONE;
    }
    size_t bytes = class != 0 ? request->count * server->layout.classes->of[class].size : request->bytes;
    bool urgent = is_backlog(endpoint, bytes);
    bool sent = push_freed(endpoint, request, urgent);
    endpoint->sent_bytes -= sent ? 0 : bytes;
    endpoint_leave(endpoint);
    if (!sent) {
        client_overflow(server, request->blocks, request->count);
    }
    if (urgent || !sent) {
        server_wake(server);
    }
    return ANSWER_DONE;
}

/* ---- calls ---- */

static uint64_t timeout_ns(const struct server *server, const struct call *call) {
    return call->request.kind == REQUEST_RUN_LONG ? server_long_timeout_ns(server) : server->timeout_ns;
}

/* A slot, after a wait if more threads call than there are slots; NULL if that takes too long. */
static struct call *client_claim(struct server *server, unsigned from) {
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
    uint64_t header = record_header(call->request.kind, (uint32_t)(call - server->calls), 0);
    uint64_t start = 0;
    for (;;) {
        struct endpoint *endpoint = client_enter(server, number);
        if (endpoint == NULL) {
            return ANSWER_SHARED;
        }
        bool sent = ring_push(&endpoint->ring, header, NULL, true);
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
        for (int spins = 0; spins < CALL_SPINS; spins++) {
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
            if (request_runs_work(&call->request) && now != heartbeat) {
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

/* Has the server answer the request, and waits. */
static enum answer call_server(struct server *server, unsigned number, struct request *request) {
    struct call *call = client_claim(server, number);
    if (call == NULL) {
        return ANSWER_UNRESPONSIVE;
    }
    call->request = *request;
    call->request.blocks = call->blocks;
    atomic_store_explicit(&call->state, CALL_PENDING, memory_order_release);
    /* A call that could not be sent may still be served, for an old record that names its slot. */
    enum answer sent = send_call(server, number, call);
    if ((sent == ANSWER_DONE || !call_retract(call)) && wait_for(server, call)) {
        for (size_t i = 0; i < call->request.count; i++) {
            request->blocks[i] = call->blocks[i];
        }
        request->count = call->request.count;
        request->zero = call->request.zero;
        call_free(call);
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

/* Takes what is ready at the endpoint, and leaves it. If that was the last of a queue: wakes a sleeping
 * server to fill it before the next client misses, which would have to wait. */
static size_t take_ready(struct server *server, struct endpoint *endpoint, struct request *request) {
    uint32_t class = request->class;
    size_t got = class == 0 ? 0 : client_cache_pop(endpoint, class, request->blocks, request->count);
    bool wakes = false;
    if (got == 0) {
        got = prefill_queue_take(endpoint, request);
        count_one(got > 0 ? &endpoint->hits : &endpoint->misses);
        wakes = got > 0 && atomic_load_explicit(&server->state, memory_order_relaxed) == SERVER_SLEEPS &&
                prefill_queue_is_empty(endpoint, prefill_queue_for(request));
    }
    endpoint_leave(endpoint);
    if (wakes) {
        server_wake(server);
    }
    return got;
}

static enum answer client_take(struct server *server, unsigned number, struct request *request) {
    enum answer answer = client_check(server);
    if (answer == ANSWER_SHARED || server_forks_here(server)) {
        return answer;
    }
    if (request->align_pages <= 1) {
        struct endpoint *endpoint = client_enter(server, number);
        if (endpoint == NULL) {
            return ANSWER_SHARED;
        }
        size_t got = take_ready(server, endpoint, request);
        if (got > 0) {
            request->count = got;
            return ANSWER_DONE;
        }
    }
    return answer == ANSWER_DONE ? call_server(server, number, request) : answer;
}

static enum answer client_run(struct server *server, unsigned number, struct request *request) {
    enum answer answer = client_check(server);
    bool waits = answer == ANSWER_UNRESPONSIVE && request->kind == REQUEST_RUN_LONG &&
                 !server_is_orphaned(server) && !server_forks_here(server);
    return answer == ANSWER_DONE || waits ? call_server(server, number, request) : answer;
}

enum answer client_ask(struct server *server, unsigned number, struct request *request) {
    return request->kind == REQUEST_TAKE  ? client_take(server, number, request)
           : request->kind == REQUEST_PUT ? client_put(server, number, request)
                                          : client_run(server, number, request);
}

struct endpoint_sums client_counts(const struct server *server) {
    struct endpoint_sums sum = {0};
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        sum.hits += atomic_load_explicit(&endpoint->hits, memory_order_relaxed);
        sum.misses += atomic_load_explicit(&endpoint->misses, memory_order_relaxed);
    }
    return sum;
}
