#include "offload/sync.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#define SYNC_SPINS 1024

/* One message there and back. Under the clients' lock. */
static bool exchange(struct server *server, struct mailbox *mailbox) {
    calm_assert(lock_is_mine(&mailbox->clients));
    atomic_store_explicit(&mailbox->ready, MAILBOX_REQUEST, memory_order_seq_cst);
    server_wake(server);
    uint64_t start = 0;
    for (unsigned spins = 0; atomic_load_explicit(&mailbox->done, memory_order_acquire) == 0; spins++) {
        cpu_relax();
        if (!server_serves(server) &&
            (mailbox_retract(mailbox) ||
             atomic_load_explicit(&mailbox->ready, memory_order_relaxed) == MAILBOX_CANCELLED)) {
            return false;
        }
        if (spins % SYNC_SPINS == SYNC_SPINS - 1) {
            os_syscall(SYS_sched_yield); /* clients that spin may keep the server from its CPU */
            if (clock_has_passed(&start, server->setup.timeout_ns) && mailbox_retract(mailbox)) {
                server_mark_late(server);
                return false;
            }
        }
    }
    atomic_store_explicit(&mailbox->done, 0, memory_order_relaxed);
    return true;
}

bool client_ask_sync(struct server *server, uint32_t size_class, void **block) {
    struct mailbox *mailbox = &server->mailbox;
    if (!server_serves(server) || server_is_late(server)) {
        return false;
    }
    bool takes = *block == NULL;
    lock_acquire(&mailbox->clients);
    mailbox->size_class = size_class;
    mailbox->block = *block;
    bool answered = exchange(server, mailbox);
    if (takes && answered) {
        *block = mailbox->block;
    }
    lock_release(&mailbox->clients);
    return answered && *block != NULL;
}
