#include "offload/sync.h"

#include "offload/client.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#define SPINS 1024

/* Takes the request back; false if it is too late, and an answer will come. */
static bool take_back(struct sync *sync) {
    uint32_t request = SYNC_REQUEST;
    return atomic_compare_exchange_strong_explicit(&sync->ready, &request, SYNC_NONE, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

static bool is_closing(const struct sync *sync) {
    return atomic_load_explicit(&sync->closing, memory_order_relaxed);
}

/* One message there and back. False if the server does not answer, which then is known to all, or will not
 * before the lock is free. Under the clients' lock. */
static bool exchange(struct server *server, struct sync *sync) {
    atomic_store_explicit(&sync->ready, SYNC_REQUEST, memory_order_seq_cst);
    server_wake(server);
    uint64_t start = 0;
    for (unsigned spins = 0; atomic_load_explicit(&sync->done, memory_order_acquire) == 0; spins++) {
        cpu_relax();
        if (is_closing(sync) && take_back(sync)) {
            return false;
        }
        if (spins % SPINS == SPINS - 1) {
            /* Clients that spin may keep the server from its CPU. */
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
            if (server_is_left_behind(server)) {
                return false; /* the waiting thread forked, in a signal handler, and this is the child */
            }
            uint64_t now = clock_now_ns();
            start = start == 0 ? now : start;
            if (now - start > server->patience_ns && take_back(sync)) {
                client_give_up(server);
                return false;
            }
        }
    }
    atomic_store_explicit(&sync->done, 0, memory_order_relaxed);
    return true;
}

static enum answer ask(struct server *server, uint32_t class, void **block) {
    if (atomic_load_explicit(&server->phase, memory_order_acquire) == PHASE_NONE) {
        server_begin(server);
    }
    if (server_forks_here(server) && !server_is_lent(server)) {
        return ANSWER_LOST;
    }
    struct sync *sync = &server->sync;
    bool lent;
    bool answered;
    bool again;
    do {
        while (is_closing(sync)) {
            os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
        }
        lock_acquire(&sync->clients);
        sync->class = class;
        sync->block = *block;
        lent = atomic_load_explicit(&server->phase, memory_order_acquire) == PHASE_LENT;
        answered = !lent && !client_is_starved(server) && exchange(server, sync);
        again = !lent && !answered && is_closing(sync);
        *block = sync->block;
        lock_release(&sync->clients);
    } while (again);
    return answered ? ANSWER_DONE : lent ? ANSWER_LENT : ANSWER_LOST;
}

enum answer client_take_sync(struct server *server, uint32_t class, void **block) {
    *block = NULL;
    return ask(server, class, block);
}

enum answer client_put_sync(struct server *server, uint32_t class, void *block) {
    return ask(server, class, &block);
}
