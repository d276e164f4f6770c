#include "offload/sync.h"

#include "offload/heap_mode.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#define SPINS 1024

static bool is_closing(const struct mailbox *mailbox) {
    return atomic_load_explicit(&mailbox->closing, memory_order_relaxed);
}

/* One message there and back. False if the server does not answer, which then is known to all, or will not
 * before the lock is free. Under the clients' lock. */
static bool exchange(struct server *server, struct mailbox *mailbox) {
    atomic_store_explicit(&mailbox->ready, MAILBOX_REQUEST, memory_order_seq_cst);
    server_wake(server);
    uint64_t start = 0;
    for (unsigned spins = 0; atomic_load_explicit(&mailbox->done, memory_order_acquire) == 0; spins++) {
        cpu_relax();
        if (is_closing(mailbox) && mailbox_retract(mailbox)) {
            return false;
        }
        if (spins % SPINS == SPINS - 1) {
            os_syscall(SYS_sched_yield); /* clients that spin may keep the server from its CPU */
            if (server_is_orphaned(server)) {
                return false; /* the waiting thread forked, in a signal handler, and this is the child */
            }
            if (clock_has_passed(&start, server->timeout_ns) && mailbox_retract(mailbox)) {
                server_mark_unresponsive(server);
                return false;
            }
        }
    }
    atomic_store_explicit(&mailbox->done, 0, memory_order_relaxed);
    return true;
}

static enum answer ask(struct server *server, uint32_t class, void **block) {
    if (atomic_load_explicit(&server->heap_mode, memory_order_acquire) == HEAP_MODE_UNSET) {
        server_begin(server);
    }
    if (server_forks_here(server) && !server_is_shared(server)) {
        return ANSWER_UNRESPONSIVE;
    }
    struct mailbox *mailbox = &server->mailbox;
    for (;;) {
        while (is_closing(mailbox)) {
            os_syscall(SYS_sched_yield);
        }
        lock_acquire(&mailbox->clients);
        mailbox->class = class;
        mailbox->block = *block;
        enum answer answer = server_is_shared(server) ? ANSWER_SHARED
                             : !server_is_unresponsive(server) && exchange(server, mailbox)
                                 ? ANSWER_DONE
                                 : ANSWER_UNRESPONSIVE;
        bool again = answer == ANSWER_UNRESPONSIVE && is_closing(mailbox);
        *block = mailbox->block;
        lock_release(&mailbox->clients);
        if (!again) {
            return answer;
        }
    }
}

enum answer client_take_sync(struct server *server, uint32_t class, void **block) {
    *block = NULL;
    return ask(server, class, block);
}

enum answer client_put_sync(struct server *server, uint32_t class, void *block) {
    return ask(server, class, &block);
}
