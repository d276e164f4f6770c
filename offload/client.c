#include "offload/client.h"

#include "offload/client_cache.h"
#include "offload/prefill_queue.h"
#include "os/clock.h"
#include "os/futex.h"

/* A client polls for its answer for so long before it sleeps: the server has a
 * CPU to itself, and a sleep and a wakeup take nearly as long. */
#define SPIN_NS    60000ULL
#define CALL_SPINS 16 /* between two checks of the clock */
/* Endpoints that a client tries, its own first. */
#define TRIES 4

/* Enters the endpoint of that number or one next to it. NULL if other threads
 * are in these, or the server does not serve: once it has entered an endpoint
 * after it stopped, no client sends anything there. */
static struct endpoint *client_enter(struct server *server, unsigned number) {
    server_open(server, number);
    for (unsigned i = 0; i < TRIES && server_serves(server); i++) {
        struct endpoint *endpoint = server_endpoint(server, (number + i) % server->setup.endpoint_count);
        if (endpoint != NULL && endpoint_try(endpoint)) {
            if (server_serves(server)) {
                return endpoint;
            }
            endpoint_leave(endpoint);
        }
    }
    return NULL;
}

/* ---- frees ---- */

/* Adds freed bytes. Whether too much waits in the ring to leave the server
 * napping. */
static bool is_backlog(struct endpoint *endpoint, size_t bytes) {
    endpoint->sent_bytes += bytes;
    if (endpoint->sent_bytes - endpoint->served_seen > MAX_BACKLOG_BYTES) {
        endpoint->served_seen = atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed);
    }
    return endpoint->sent_bytes - endpoint->served_seen > MAX_BACKLOG_BYTES;
}

static bool push_freed(struct endpoint *endpoint, const struct request *request, bool urgent) {
    uint32_t size_class = request->size_class;
    const uint64_t large[] = {(uintptr_t)request->blocks[0], request->bytes};
    const uint64_t *payload = size_class != 0 ? (const uint64_t *)(const void *)request->blocks : large;
    uint64_t header = record_header(RECORD_PUT, size_class, size_class != 0 ? request->count : 2);
    return ring_push(&endpoint->ring, header, payload, urgent);
}

bool client_put(struct server *server, unsigned number, const struct request *request) {
    uint32_t size_class = request->size_class;
    struct endpoint *endpoint = client_enter(server, number);
    if (endpoint == NULL) {
        return false;
    }
    bool urgent = false;
    bool sent = size_class != 0 && client_cache_push(endpoint, size_class, request->blocks, request->count);
    if (!sent) {
        size_t bytes = size_class != 0 ? request->count * server->setup.layout.classes->of[size_class].size
                                       : request->bytes;
        urgent = is_backlog(endpoint, bytes);
        sent = push_freed(endpoint, request, urgent);
        urgent |= !sent;
        endpoint->sent_bytes -= sent ? 0 : bytes;
    }
    endpoint_leave(endpoint);
    /* A server that sleeps for good must return the block to the heap later. If
     * it has only just gone to sleep, this client may overlook it, and the next
     * one does not. */
    if (urgent || atomic_load_explicit(&server->words.state, memory_order_relaxed) == SERVER_SLEEPS) {
        server_wake(server);
    }
    return sent;
}

/* ---- calls ---- */

/* False if there is no endpoint to send it through, or no room in the ring. */
static bool send_call(struct server *server, unsigned number, const struct call *call) {
    struct endpoint *endpoint = client_enter(server, number);
    if (endpoint == NULL) {
        return false;
    }
    uint64_t header = record_header(RECORD_CALL, (uint32_t)(call - server->calls), 0);
    bool sent = ring_push(&endpoint->ring, header, NULL, true);
    endpoint_leave(endpoint);
    server_wake(server);
    return sent;
}

static bool is_done(uint32_t state) {
    return (state & CALL_STATE) == CALL_DONE;
}

/* Until the call is done. False if it was abandoned, or cancelled. */
static bool wait_for(struct server *server, struct call *call) {
    uint64_t start = clock_now_ns();
    do {
        for (int spins = 0; spins < CALL_SPINS; spins++) {
            if (is_done(atomic_load_explicit(&call->state, memory_order_acquire))) {
                return true;
            }
            cpu_relax();
        }
    } while (clock_now_ns() - start < SPIN_NS);
    server_wake_always(server);
    for (;;) {
        uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
        if (is_done(state)) {
            return true;
        }
        if (state == CALL_CLAIMED) {
            call_free(call); /* a signal handler forked on this thread, and this is the child */
            return false;
        }
        uint64_t waited = clock_now_ns() - start;
        if (waited >= server->setup.timeout_ns) {
            if (call_abandon(call)) {
                return false;
            }
        } else if ((state & CALL_SLEEPING) != 0 ||
                   atomic_compare_exchange_strong_explicit(&call->state, &state, state | CALL_SLEEPING,
                                                           memory_order_relaxed, memory_order_relaxed)) {
            futex_wait(&call->state, state | CALL_SLEEPING, server->setup.timeout_ns - waited);
        }
    }
}

/* Has the server serve the request, and waits. Returns the number of blocks. */
static size_t call_server(struct server *server, unsigned number, struct request *request) {
    struct call *call = call_claim(server->calls, number);
    if (call == NULL) {
        return 0;
    }
    call->request = *request;
    call->request.blocks = call->blocks;
    atomic_store_explicit(&call->state, CALL_PENDING, memory_order_release);
    /* A call that could not be sent may still be served, for an old record that
     * names its slot. */
    if (!send_call(server, number, call) && call_retract(call)) {
        return 0;
    }
    if (!wait_for(server, call)) {
        server_mark_late(server);
        return 0;
    }
    size_t count = call->request.count;
    for (size_t i = 0; i < count; i++) {
        request->blocks[i] = call->blocks[i];
    }
    request->zero = call->request.zero;
    call_free(call);
    return count;
}

/* ---- allocations ---- */

/* Takes what is ready at the endpoint, and leaves it. If that was the last of a
 * queue: wakes a server that sleeps, to fill it before the next client misses,
 * which would have to wait. */
static size_t take_ready(struct server *server, struct endpoint *endpoint, struct request *request) {
    uint32_t size_class = request->size_class;
    size_t got =
        size_class == 0 ? 0 : client_cache_pop(endpoint, size_class, request->blocks, request->count);
    bool wakes = false;
    if (got == 0) {
        got = prefill_queue_take(endpoint, request);
        count_one(got > 0 ? &endpoint->hits : &endpoint->misses);
        wakes = got > 0 && atomic_load_explicit(&server->words.state, memory_order_relaxed) >= SERVER_DOZES &&
                prefill_queue_is_empty(endpoint, prefill_queue_for(request));
    }
    endpoint_leave(endpoint);
    if (wakes) {
        server_wake(server);
    }
    return got;
}

size_t client_take(struct server *server, unsigned number, struct request *request) {
    if (request->align_pages <= 1) {
        struct endpoint *endpoint = client_enter(server, number);
        if (endpoint == NULL) {
            return 0;
        }
        size_t got = take_ready(server, endpoint, request);
        if (got > 0) {
            return got;
        }
    }
    return server_serves(server) && !server_is_late(server) ? call_server(server, number, request) : 0;
}

struct endpoint_sums client_counts(const struct server *server) {
    struct endpoint_sums sum = {0};
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        sum.hits += atomic_load_explicit(&endpoint->hits, memory_order_relaxed);
        sum.misses += atomic_load_explicit(&endpoint->misses, memory_order_relaxed);
    }
    return sum;
}
