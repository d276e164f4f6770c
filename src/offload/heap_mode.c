#include "offload/heap_mode.h"

#include "base/assert.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "os/syscall.h"

/* Serves all of the overflow, too: server_serve leaves it while another thread pushes. */
static void serve_all(struct server *server) {
    while (server_serve(server) || !overflow_is_empty(&server->overflow)) {
        os_syscall(SYS_sched_yield);
    }
}

static void switch_to_shared(struct server *server, enum governor_mode mode) {
    calm_assert(lock_is_mine(&server->open_lock), mode);
    serve_all(server);
    prefill_withdraw_all(server);
    server->hooks.switch_to_shared(server->hooks.context, mode);
    atomic_store_explicit(&server->heap_mode, HEAP_MODE_SHARED, memory_order_release);
}

void heap_mode_share(struct server *server, enum governor_mode mode) {
    prefill_withdraw_all(server); /* most of the blocks, while clients still run */
    lock_acquire(&server->open_lock);
    /* Until it leaves them, no client sends a record or reads the mode. */
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        endpoint_enter(endpoint, ENTER_ALWAYS);
    }
    switch_to_shared(server, mode);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        endpoint_leave(endpoint);
    }
    lock_release(&server->open_lock);
}

void heap_mode_take_exclusive(struct server *server) {
    /* Not while another thread forks: its child needs a heap that is in one of the modes. */
    lock_acquire(&server->open_lock);
    atomic_store_explicit(&server->heap_mode, HEAP_MODE_EXCLUSIVE, memory_order_seq_cst);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        while (atomic_load_explicit(&endpoint->inside, memory_order_seq_cst) != 0) {
            if (atomic_load_explicit(&server->parking, memory_order_relaxed) != PARKING_REQUESTED) {
                /* There is no progress if the thread inside may be the one that forks. */
                count_one(&server->heartbeat);
            }
            os_syscall(SYS_sched_yield);
        }
    }
    server->hooks.switch_to_exclusive(server->hooks.context);
    lock_release(&server->open_lock);
    server->contention.checked_ns = 0;
}

void heap_mode_begin(struct server *server) {
    lock_acquire(&server->open_lock);
    if (atomic_load_explicit(&server->heap_mode, memory_order_relaxed) == HEAP_MODE_UNSET) {
        /* In the server's place: there is none, and no other thread is at the heap. */
        switch_to_shared(server, SHARED_FOREGROUND);
    }
    lock_release(&server->open_lock);
}
