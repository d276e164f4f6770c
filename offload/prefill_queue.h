/*
 * A prefill queue: magazines of one size class, or large blocks of one size,
 * from the server to the thread that has entered the endpoint: a client, or the
 * server when it withdraws.
 *
 * The server stores a slot's content, then its `filled` (release), then `put`.
 * A client loads `filled` (acquire), then the content, and stores `taken`
 * (release), which the server loads (acquire) before it reuses the slot. The
 * level is put - taken, modulo 2^32. tests/model/prefill.pml has the proof.
 */
#ifndef CALM_OFFLOAD_PREFILL_QUEUE_H
#define CALM_OFFLOAD_PREFILL_QUEUE_H

#include "base/size.h"
#include "offload/endpoint.h"

#define MAX_PREFILLED_MAGAZINES 32

/* Each class has room for this much, but at least for two magazines. For the
 * page that it may keep in use, a block counts as MIN_PREFILL_CHARGE at
 * least. */
#define MAX_PREFILL_CLASS_BYTES ((size_t)256 << 10)
#define MIN_PREFILL_CHARGE      512

/* Adds the queues to the layout. */
void prefill_queue_lay_out(struct endpoint_layout *layout);

static inline bool prefill_queue_is_large(uint32_t queue) {
    return queue >= SIZE_CLASSES;
}

/* The queue that has what a request takes. Sizes of large blocks near each
 * other have different queues. */
static inline uint32_t prefill_queue_for(const struct request *request) {
    return request->size_class != 0 ? request->size_class
                                    : SIZE_CLASSES + (uint32_t)(request->pages % LARGE_QUEUES);
}

/* The bytes that a magazine counts as. */
static inline size_t prefill_queue_charge(const struct size_class *size_class) {
    return size_max(size_class->size, MIN_PREFILL_CHARGE) * size_class->batch;
}

/* The thread that holds the server's lock, or that has entered; a guess for any
 * other. */
static inline uint32_t prefill_queue_level(const struct endpoint *endpoint, uint32_t queue) {
    return atomic_load_explicit(&endpoint->put[queue], memory_order_relaxed) -
           atomic_load_explicit(&endpoint->taken[queue], memory_order_acquire);
}

/* ---- the server ---- */

/* Puts a magazine, or a large block. False if the queue is full. */
bool prefill_queue_put(struct endpoint *endpoint, const struct request *request);

/* ---- the thread that has entered ---- */

/* Takes a magazine, and more of them as long as there is room; or a large
 * block. Returns the number of blocks; 0 if there are none. */
size_t prefill_queue_take(struct endpoint *endpoint, struct request *request);

/* Whether a client would find nothing. */
bool prefill_queue_is_empty(struct endpoint *endpoint, uint32_t queue);

#endif
