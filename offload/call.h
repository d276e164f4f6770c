/*
 * A call: a request for whose answer a client waits, in one of the process's
 * slots. Its state goes FREE, CLAIMED (a client fills it), PENDING (the server
 * may begin), TAKEN (the server works on it), DONE (the client reads the
 * answer), FREE. The client may abandon a PENDING or TAKEN call; the server
 * then puts the blocks back and frees the slot, which therefore never lies on a
 * client's stack. The ring carries the slot's number; a record whose slot is
 * not PENDING is stale, and ignored. tests/model/call.pml has the proof.
 */
#ifndef CALM_OFFLOAD_CALL_H
#define CALM_OFFLOAD_CALL_H

#include "base/size_class.h"
#include "offload/request.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#define CALLS 128

enum call_state { CALL_FREE, CALL_CLAIMED, CALL_PENDING, CALL_TAKEN, CALL_DONE, CALL_ABANDONED };
#define CALL_STATE    0x7U
#define CALL_SLEEPING 0x8U /* the client sleeps on the word */

struct call {
    _Alignas(64) _Atomic(uint32_t) state;
    _Atomic(uint64_t) claimer; /* thread pointer of the last client that claimed the slot */
    struct request request;
    void *blocks[MAX_MAGAZINE_BLOCKS]; /* the request's */
};

/* ---- the client ---- */

/* Claims a free one of the CALLS slots, from that number on. NULL if there is
 * none. */
struct call *call_claim(struct call *calls, unsigned from);

/* Withdraws a call that was not sent. False if the server has begun it
 * nevertheless, for a stale record. */
bool call_retract(struct call *call);

/* Leaves the call to the server. False if it is done, or cancelled. */
bool call_abandon(struct call *call);

/* The client has read the answer, or the server has undone an abandoned
 * call. */
static inline void call_free(struct call *call) {
    atomic_store_explicit(&call->state, CALL_FREE, memory_order_release);
}

/* ---- the server ---- */

/* False if there is nothing to do: the record is stale, or the call abandoned,
 * and its slot now free. */
bool call_begin(struct call *call);

/* Passes the answer to the client. False if the call was abandoned: the server
 * must undo it and free the slot. Otherwise another client may have the slot
 * when this returns. */
bool call_answer(struct call *call);

/* ---- a forked child ---- */

/* In the child of a fork, which has no server: frees the slots of the other
 * threads. A call that the forking thread waits for, since a signal handler
 * forks that interrupted it, goes back to CLAIMED: the thread finds it
 * cancelled, and frees it. */
void calls_start_child(struct call *calls);

#endif
