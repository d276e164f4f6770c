#include "offload/sync.h"

#include "base/assert.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#define SYNC_SPINS 1024

/* One message there and back. Under the clients' lock. */
static enum answer exchange(struct server *server, struct mailbox *mailbox) {
    calm_assert(lock_is_mine(&mailbox->clients));
    atomic_store_explicit(&mailbox->ready, MAILBOX_REQUEST, memory_order_seq_cst);
    server_wake(server);
    uint64_t start = 0;
    for (unsigned spins = 0; atomic_load_explicit(&mailbox->done, memory_order_acquire) == 0; spins++) {
        cpu_relax();
        if (server_is_shared(server) && mailbox_retract(mailbox)) {
            return ANSWER_SHARED;
        }
        if (spins % SYNC_SPINS == SYNC_SPINS - 1) {
            os_syscall(SYS_sched_yield); /* clients that spin may keep the server from its CPU */
            if (server_is_orphaned(server)) {
                return ANSWER_UNRESPONSIVE; /* the thread forked, in a signal handler, and this is the child
                                             */
            }
            bool parked = atomic_load_explicit(&server->parking, memory_order_relaxed) == PARKING_PARKED;
            start = parked ? 0 : start; /* a fork may take long */
            if (clock_has_passed(&start, server->timeout_ns) && mailbox_retract(mailbox)) {
                server_mark_unresponsive(server);
                return ANSWER_UNRESPONSIVE;
            }
        }
    }
    atomic_store_explicit(&mailbox->done, 0, memory_order_relaxed);
    return ANSWER_DONE;
}

enum answer client_ask_sync(struct server *server, struct request *request) {
    bool takes = request->kind == REQUEST_TAKE;
    struct mailbox *mailbox = &server->mailbox;
    enum answer answer = client_check(server); /* which may begin shared mode */
    if (answer != ANSWER_DONE) {
        return answer;
    }
    lock_acquire(&mailbox->clients);
    mailbox->class = request->class;
    mailbox->block = takes ? NULL : request->blocks[0];
    answer = client_check(server);
    answer = answer == ANSWER_DONE ? exchange(server, mailbox) : answer;
    if (takes && answer == ANSWER_DONE) {
        request->blocks[0] = mailbox->block;
        request->count = mailbox->block != NULL;
    }
    lock_release(&mailbox->clients);
    return answer;
}
