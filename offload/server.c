#include "offload/server.h"

#include "arena/blocks.h"
#include "arena/large.h"
#include "offload/client_cache.h"
#include "offload/prefill_queue.h"
#include "os/futex.h"
#include "os/syscall.h"
#include "os/vm.h"

struct endpoint *server_open(struct server *server, unsigned number) {
    const struct server_setup *setup = &server->setup;
    number %= setup->endpoint_count;
    struct endpoint *endpoint = server_endpoint(server, number);
    if (endpoint != NULL || lock_is_mine(&server->opening)) {
        return endpoint; /* a thread that forks has entered those that are open, and opens no other */
    }
    lock_acquire(&server->opening);
    endpoint = server_endpoint(server, number);
    void *memory = setup->endpoint_memory + number * setup->endpoint_bytes;
    if (endpoint == NULL && vm_commit(memory, setup->endpoint_bytes)) {
        endpoint = memory;
        endpoint->layout = &setup->layout;
        endpoint->next = server_endpoints(server);
        atomic_store_explicit(&server->words.last_opened, endpoint, memory_order_seq_cst);
        atomic_store_explicit(&setup->endpoints[number], endpoint, memory_order_release);
    }
    lock_release(&server->opening);
    return endpoint != NULL ? endpoint : server_endpoint(server, 0);
}

bool server_init(struct server *server, size_t cache_class_bytes) {
    struct server_setup *setup = &server->setup;
    server->locked.process = (int)os_syscall(SYS_getpid);
    lock_set_rank(&server->lock, LOCK_OUTER_1);
    lock_set_rank(&server->opening, LOCK_OUTER_2);
    lock_set_rank(&server->mailbox.clients, LOCK_OUTER_2);
    setup->layout.classes = setup->arenas->of[0].heap.classes;
    prefill_queue_lay_out(&setup->layout);
    client_cache_lay_out(&setup->layout, cache_class_bytes);
    setup->endpoint_bytes = vm_round_up(sizeof(struct endpoint) + setup->layout.words * sizeof(uint64_t));
    setup->endpoint_count = setup->arenas->caches->count;
    setup->endpoints = vm_map(setup->endpoint_count * sizeof *setup->endpoints);
    setup->endpoint_memory = vm_reserve(setup->endpoint_count * setup->endpoint_bytes);
    return setup->endpoints != NULL && setup->endpoint_memory != NULL && server_open(server, 0) != NULL;
}

void server_put(struct server *server, uint32_t size_class, void *const *blocks, size_t count) {
    if (count > 0 && size_class != 0) {
        arena_put_blocks(server->setup.arenas, size_class, blocks, count);
    } else if (count > 0) {
        arena_put_large(server->setup.arenas, blocks[0]);
    }
}

/* ---- the server's lock ---- */

static bool try_lock(struct server *server, bool for_fork) {
    if (!for_fork) {
        return lock_try(&server->lock);
    }
    lock_acquire_for_fork(&server->lock, false);
    return lock_is_mine(&server->lock);
}

bool server_enter(struct server *server, uint64_t timeout_ns, bool for_fork) {
    if (lock_is_mine(&server->lock)) {
        return false;
    }
    if (try_lock(server, for_fork)) {
        return true;
    }
    atomic_fetch_add_explicit(&server->words.claims, 1, memory_order_relaxed);
    bool entered = false;
    for (uint64_t naps = timeout_ns / ENDPOINT_NAP_NS; naps > 0 && !entered; naps--) {
        endpoint_nap();
        entered = try_lock(server, for_fork);
    }
    /* A signal handler may have forked meanwhile: then this is the child, where
     * the count begins anew. */
    uint32_t claims = atomic_load_explicit(&server->words.claims, memory_order_relaxed);
    while (claims > 0 && !atomic_compare_exchange_weak_explicit(&server->words.claims, &claims, claims - 1,
                                                                memory_order_relaxed, memory_order_relaxed)) {
    }
    futex_wake_all(&server->words.claims);
    return entered;
}

/* ---- wakeups ---- */

void server_wake_always(struct server *server) {
    atomic_fetch_add_explicit(&server->words.wakeup, 1, memory_order_seq_cst);
    atomic_fetch_add_explicit(&server->counts.wakes, 1, memory_order_relaxed);
    futex_wake_all(&server->words.wakeup);
}

void server_wake(struct server *server) {
    /* If several threads come at once, the one that changes the state wakes the
     * server for all of them. */
    uint32_t state = atomic_load_explicit(&server->words.state, memory_order_seq_cst);
    while (state != SERVER_AWAKE) {
        if (atomic_compare_exchange_weak_explicit(&server->words.state, &state, SERVER_AWAKE,
                                                  memory_order_seq_cst, memory_order_seq_cst)) {
            server_wake_always(server);
            return;
        }
    }
}

void server_mark_late(struct server *server) {
    /* With a wakeup: else the server might go to sleep and leave its clients to
     * themselves for good. */
    atomic_store_explicit(&server->words.is_late, true, memory_order_seq_cst);
    server_wake(server);
    atomic_fetch_add_explicit(&server->counts.late, 1, memory_order_relaxed);
}

bool server_is_held(const struct server *server) {
    bool held = lock_is_mine(&server->lock) || lock_is_mine(&server->opening) ||
                lock_is_mine(&server->mailbox.clients);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        held |= endpoint_is_mine(endpoint);
    }
    return held;
}
