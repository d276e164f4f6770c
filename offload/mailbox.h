/*
 * The mailbox of test_sync=on: the scheme of "NextGen-Malloc" as printed
 * (section 4.2, pseudo code 1), where each malloc and each free is a message
 * whose answer the client waits for. Corrected in two points: the client clears
 * `done`, or the second malloc returns the first one's block; and a lock admits
 * one client, or two that find malloc_ready clear overwrite each other's
 * request. tests/model/paper.pml shows both faults.
 *
 * A client that waits for too long retracts its request. So neither a server
 * that stops serving nor a fork waits for the lock; in the child of a fork all
 * of it is reset.
 */
#ifndef CALM_OFFLOAD_MAILBOX_H
#define CALM_OFFLOAD_MAILBOX_H

#include "os/lock.h"

#include <stdbool.h>
#include <stddef.h>

enum mailbox_request {
    MAILBOX_EMPTY,
    MAILBOX_REQUEST,
    MAILBOX_TAKEN,     /* the server works on it: too late to retract */
    MAILBOX_CANCELLED, /* by a fork, in the child, which has no server */
};

struct mailbox {
    struct lock clients;
    _Alignas(64) _Atomic(uint32_t) ready; /* enum mailbox_request */
    _Atomic(uint32_t) done;               /* the request was served */
    uint32_t size_class;
    void *block; /* in: to free, or NULL; out: allocated */
};

/* The client, under the lock. False if the server has taken the request, and
 * will answer. */
static inline bool mailbox_retract(struct mailbox *mailbox) {
    uint32_t request = MAILBOX_REQUEST;
    return atomic_compare_exchange_strong_explicit(&mailbox->ready, &request, MAILBOX_EMPTY,
                                                   memory_order_acq_rel, memory_order_relaxed);
}

/* The server. False if there is no request. */
static inline bool mailbox_take(struct mailbox *mailbox) {
    uint32_t request = MAILBOX_REQUEST;
    return atomic_load_explicit(&mailbox->ready, memory_order_relaxed) == MAILBOX_REQUEST &&
           atomic_compare_exchange_strong_explicit(&mailbox->ready, &request, MAILBOX_TAKEN,
                                                   memory_order_acquire, memory_order_relaxed);
}

static inline void mailbox_answer(struct mailbox *mailbox) {
    atomic_store_explicit(&mailbox->ready, MAILBOX_EMPTY, memory_order_relaxed);
    atomic_store_explicit(&mailbox->done, 1, memory_order_release);
}

#endif
