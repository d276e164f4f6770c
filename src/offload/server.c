#include "offload/server.h"

#include "base/size.h"
#include "offload/client_cache.h"
#include "offload/prefill_queue.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/vm.h"

/* Of the overflow: 8 MiB, or less where address space is limited. */
#define MAX_OVERFLOW_BLOCKS ((size_t)1 << 20)
#define OVERFLOW_SHARE      64

bool server_open(struct server *server, unsigned number) {
    lock_acquire(&server->open_lock);
    bool open = atomic_load_explicit(&server->is_open[number], memory_order_relaxed);
    if (!open && vm_commit(server_endpoint(server, number), server->endpoint_bytes)) {
        unsigned opened = server_opened(server);
        atomic_store_explicit(&server->open[opened], (uint16_t)number, memory_order_relaxed);
        atomic_store_explicit(&server->opened, opened + 1, memory_order_seq_cst);
        atomic_store_explicit(&server->is_open[number], true, memory_order_release);
        open = true;
    }
    lock_release(&server->open_lock);
    return open;
}

bool server_init(struct server *server, unsigned endpoint_count, size_t cache_class_bytes) {
    server->layout.classes = server->hooks.classes;
    prefill_queue_lay_out(&server->layout);
    client_cache_lay_out(&server->layout, cache_class_bytes);
    size_t page = vm_page_size();
    size_t bytes = sizeof(struct endpoint) + server->layout.words * sizeof(uint64_t);
    server->endpoint_bytes = size_round_up(bytes, page);
    server->endpoint_count = endpoint_count;
    size_t lists = size_round_up(endpoint_count * (sizeof *server->open + sizeof *server->is_open), page);
    char *memory = vm_reserve(lists, page);
    if (memory == NULL || !vm_commit(memory, lists)) {
        return false;
    }
    server->open = (_Atomic(uint16_t) *)(void *)memory;
    server->is_open = (_Atomic(bool) *)(void *)(memory + endpoint_count * sizeof *server->open);
    server->endpoints = vm_reserve(endpoint_count * server->endpoint_bytes, page);
    size_t share = vm_limit_bytes() / OVERFLOW_SHARE / sizeof(void *);
    return server->endpoints != NULL &&
           overflow_init(&server->overflow, size_min(share, MAX_OVERFLOW_BLOCKS)) && server_open(server, 0);
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
    if (!atomic_load_explicit(&server->is_unresponsive, memory_order_relaxed)) {
        atomic_store_explicit(&server->unresponsive_from_ns, clock_coarse_ns(), memory_order_relaxed);
    }
    /* With a wakeup: else the server might go to sleep and leave its clients to themselves for good. */
    atomic_store_explicit(&server->is_unresponsive, true, memory_order_seq_cst);
    server_wake(server);
    atomic_fetch_add_explicit(&server->unresponsive, 1, memory_order_relaxed);
}

bool server_is_unresponsive(struct server *server) {
    if (!atomic_load_explicit(&server->is_unresponsive, memory_order_acquire)) {
        return false;
    }
    uint64_t from = atomic_load_explicit(&server->unresponsive_from_ns, memory_order_relaxed);
    if (clock_coarse_ns() - from >= server_long_timeout_ns(server)) {
        server_report_unresponsive(server);
    }
    return true;
}

void server_report_unresponsive(struct server *server) {
    if (!atomic_exchange_explicit(&server->is_reported, true, memory_order_relaxed)) {
        server->hooks.report_unresponsive(server->hooks.context);
    }
}

bool server_is_held(const struct server *server) {
    bool found = lock_is_mine(&server->fork_lock) || lock_is_mine(&server->begin_lock) ||
                 lock_is_mine(&server->open_lock) || lock_is_mine(&server->mailbox.clients) ||
                 lock_is_mine(&server->overflow.lock);
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        found |= endpoint_is_mine(server_open_endpoint(server, i));
    }
    return found;
}

bool server_interrupts_client(const struct server *server) {
    bool found = server_is_held(server);
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        const struct endpoint *endpoint = server_open_endpoint(server, i);
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
