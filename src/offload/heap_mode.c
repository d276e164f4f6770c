#include "offload/heap_mode.h"

#include "offload/prefill.h"
#include "offload/serve.h"
#include "os/syscall.h"

/* Until leave_all, no client sends anything or reads the mode. */
static void enter_all(struct server *server) {
    lock_acquire(&server->open_lock);
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        endpoint_enter(server_open_endpoint(server, i));
    }
    atomic_store_explicit(&server->mailbox.closing, true, memory_order_relaxed);
    lock_acquire(&server->mailbox.clients);
    atomic_store_explicit(&server->mailbox.closing, false, memory_order_relaxed);
    server->has_entered_all = true;
}

static void leave_all(struct server *server) {
    server->has_entered_all = false;
    lock_release(&server->mailbox.clients);
    for (unsigned i = server_opened(server); i-- > 0;) {
        endpoint_leave(server_open_endpoint(server, i));
    }
    lock_release(&server->open_lock);
}

/* Serves all of the overflow, too: server_serve leaves it while another thread pushes. */
static void serve_all(struct server *server) {
    while (server_serve(server) || !overflow_is_empty(&server->overflow)) {
        os_syscall(SYS_sched_yield);
    }
}

static void switch_to_shared(struct server *server, enum sharing sharing) {
    serve_all(server);
    prefill_withdraw_all(server);
    server->hooks.switch_to_shared(server->hooks.context, sharing);
    atomic_store_explicit(&server->heap_mode, HEAP_MODE_SHARED, memory_order_release);
}

void heap_mode_share(struct server *server, enum sharing sharing) {
    prefill_withdraw_all(server); /* most of the blocks, while clients still run */
    enter_all(server);
    switch_to_shared(server, sharing);
    leave_all(server);
}

void heap_mode_take_exclusive(struct server *server) {
    /* Not while another thread forks: its child needs a heap that is in one of the modes. */
    lock_acquire(&server->open_lock);
    atomic_store_explicit(&server->heap_mode, HEAP_MODE_EXCLUSIVE, memory_order_seq_cst);
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        struct endpoint *endpoint = server_open_endpoint(server, i);
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

bool heap_mode_enter(struct server *server, struct endpoint *endpoint) {
    atomic_fetch_add_explicit(&endpoint->inside, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&server->heap_mode, memory_order_seq_cst) != HEAP_MODE_SHARED) {
        heap_mode_leave(endpoint);
        return false;
    }
    atomic_store_explicit(&endpoint->last_inside, lock_self(), memory_order_relaxed);
    return true;
}

void heap_mode_leave(struct endpoint *endpoint) {
    atomic_fetch_sub_explicit(&endpoint->inside, 1, memory_order_release);
}

void server_begin(struct server *server) {
    lock_acquire(&server->begin_lock);
    if (atomic_load_explicit(&server->heap_mode, memory_order_relaxed) == HEAP_MODE_UNSET) {
        /* In the server's place: there is none, and no other thread is at the heap. */
        switch_to_shared(server, SHARING_UNTIL_START);
    }
    lock_release(&server->begin_lock);
}
