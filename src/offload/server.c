#include "offload/server.h"

#include "base/size.h"
#include "offload/client_cache.h"
#include "offload/prefill_queue.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"
#include "os/vm.h"

/* Of the overflow: 8 MiB, or less where address space is limited. */
#define MAX_OVERFLOW_BYTES ((size_t)8 << 20)
#define OVERFLOW_SHARE     64

struct endpoint *server_open(struct server *server, unsigned number) {
    number %= server->endpoint_count;
    struct endpoint *endpoint = server_endpoint(server, number);
    if (endpoint != NULL) {
        return endpoint;
    }
    lock_acquire(&server->open_lock);
    endpoint = server_endpoint(server, number);
    void *memory = server->endpoint_memory + number * server->endpoint_bytes;
    if (endpoint == NULL && vm_commit(memory, server->endpoint_bytes)) {
        endpoint = memory;
        endpoint->layout = &server->layout;
        endpoint->next = server_endpoints(server);
        atomic_store_explicit(&server->last_opened, endpoint, memory_order_seq_cst);
        atomic_store_explicit(&server->endpoints[number], endpoint, memory_order_release);
    }
    lock_release(&server->open_lock);
    return endpoint != NULL ? endpoint : server_endpoint(server, 0);
}

bool server_init(struct server *server, unsigned endpoint_count, size_t cache_class_bytes) {
    server->process = (int)os_syscall(SYS_getpid);
    prefill_queue_lay_out(&server->layout);
    client_cache_lay_out(&server->layout, cache_class_bytes);
    server->endpoint_bytes = vm_round_up(sizeof(struct endpoint) + server->layout.words * sizeof(uint64_t));
    server->endpoint_count = endpoint_count;
    lock_set_rank(&server->fork_lock, LOCK_SERVER_FORK);
    lock_set_rank(&server->open_lock, LOCK_SERVER_OPEN);
    lock_set_rank(&server->overflow.lock, LOCK_OVERFLOW);
    lock_set_rank(&server->mailbox.clients, LOCK_MAILBOX);
    server->endpoints = vm_map(endpoint_count * sizeof *server->endpoints);
    server->endpoint_memory = vm_reserve(endpoint_count * server->endpoint_bytes);
    size_t share = vm_limit_bytes() / OVERFLOW_SHARE;
    return server->endpoints != NULL && server->endpoint_memory != NULL &&
           address_range_reserve(&server->overflow.region, size_min(share, MAX_OVERFLOW_BYTES)) &&
           server_open(server, 0) != NULL;
}

void server_wake_always(struct server *server) {
    atomic_fetch_add_explicit(&server->wakeup, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&server->wakes, 1, memory_order_relaxed);
    futex_wake_all(&server->wakeup);
}

void server_wake(struct server *server) {
    /* If several threads come at once, the one that changes the state wakes the server for all of them. */
    uint32_t state = atomic_load_explicit(&server->state, memory_order_seq_cst);
    while (state != SERVER_AWAKE) {
        if (atomic_compare_exchange_weak_explicit(&server->state, &state, SERVER_AWAKE, memory_order_seq_cst,
                                                  memory_order_seq_cst)) {
            server_wake_always(server);
            return;
        }
    }
}

void server_mark_unresponsive(struct server *server) {
    /* With a wakeup: else the server might go to sleep and leave its clients to themselves for good. */
    if (atomic_load_explicit(&server->unresponsive_from_ns, memory_order_relaxed) == 0) {
        atomic_store_explicit(&server->unresponsive_from_ns, clock_coarse_ns(), memory_order_seq_cst);
    }
    server_wake(server);
    atomic_fetch_add_explicit(&server->unresponsive, 1, memory_order_relaxed);
}

bool server_is_unresponsive(struct server *server) {
    uint64_t from = atomic_load_explicit(&server->unresponsive_from_ns, memory_order_acquire);
    if (from != 0 && clock_coarse_ns() - from >= server_long_timeout_ns(server)) {
        server_report_unresponsive(server);
    }
    return from != 0;
}

void server_report_unresponsive(struct server *server) {
    if (!atomic_exchange_explicit(&server->is_reported, true, memory_order_relaxed)) {
        server->hooks.report_unresponsive(server->hooks.context);
    }
}

bool server_is_held(const struct server *server) {
    bool found = lock_is_mine(&server->fork_lock) || lock_is_mine(&server->open_lock) ||
                 lock_is_mine(&server->mailbox.clients) || lock_is_mine(&server->overflow.lock);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        found |= endpoint_is_mine(endpoint);
    }
    return found;
}

bool server_interrupts_client(const struct server *server) {
    bool found = server_is_held(server);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        found |= atomic_load_explicit(&endpoint->inside, memory_order_relaxed) != 0 &&
                 atomic_load_explicit(&endpoint->last_inside, memory_order_relaxed) == lock_self();
    }
    for (size_t i = 0; i < CALLS; i++) {
        const struct call *call = &server->calls[i];
        uint32_t state = atomic_load_explicit(&call->state, memory_order_relaxed) & CALL_STATE;
        found |= state != CALL_FREE && state != CALL_ABANDONED &&
                 atomic_load_explicit(&call->claimer, memory_order_relaxed) == lock_self();
    }
    return found;
}
