/*
 * A prefill queue: magazines of one size class, or large blocks of one size, from the server to the thread
 * that has entered the endpoint: a client, or the server when it withdraws.
 *
 * The server stores a slot's content, then its `filled` (release), then `put`. A client loads `filled`
 * (acquire), then the content, and stores `taken` (release), which the server loads (acquire) before it
 * reuses the slot. The level is put - taken, modulo 2^32. tests/model/prefill.pml has the proof.
 */
#ifndef CALM_OFFLOAD_PREFILL_QUEUE_H
#define CALM_OFFLOAD_PREFILL_QUEUE_H

#include "base/size.h"
#include "offload/endpoint.h"

#define MAX_PREFILLED_MAGAZINES 32

/* Each class has room for this much, but at least for two magazines. For the page that it may keep in use, a
 * block counts as MIN_PREFILL_CHARGE at least. */
#define MAX_PREFILL_CLASS_BYTES ((size_t)256 << 10)
#define MIN_PREFILL_CHARGE      512

/* What prefill_queue_put puts, and prefill_queue_take_large takes. */
struct prefill_item {
    void **blocks; /* a magazine, or one large block */
    uint64_t pages;
    bool zero;
};

/* Adds the queues to the layout. */
void prefill_queue_lay_out(struct endpoint_layout *layout);

static inline bool prefill_queue_is_large(uint32_t queue) {
    return queue >= SIZE_CLASSES;
}

/* The queue for large blocks of that many pages. Sizes that are near each other have different ones. */
static inline uint32_t prefill_queue_of_pages(uint64_t pages) {
    return SIZE_CLASSES + (uint32_t)(pages % LARGE_QUEUES);
}

/* The bytes that a magazine counts as. */
static inline size_t prefill_queue_charge(const struct size_class *class) {
    return size_max(class->size, MIN_PREFILL_CHARGE) * class->batch;
}

/* The server's thread, or the thread that has entered; a guess for any other. */
static inline uint32_t prefill_queue_level(const struct endpoint *endpoint, uint32_t queue) {
    return atomic_load_explicit(&endpoint->put[queue], memory_order_relaxed) -
           atomic_load_explicit(&endpoint->taken[queue], memory_order_acquire);
}

/* ---- the server ---- */

/* False if the queue is full. */
bool prefill_queue_put(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue,
                       const struct prefill_item *item);

/* ---- the thread that has entered ---- */

/* The server takes a magazine, or a large block. Returns the number of blocks; 0 if the queue is empty. */
size_t prefill_queue_withdraw(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue,
                              void **blocks);

/* A client takes a magazine, and more of them as long as `count` blocks hold them. Returns the number of
 * blocks. */
size_t prefill_queue_take(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t class,
                          void **blocks, size_t count);

/* A client takes a large block of that many pages. NULL if there is none. */
void *prefill_queue_take_large(struct endpoint *endpoint, uint64_t pages, bool *zero);

/* Whether a client would find nothing. */
bool prefill_queue_is_empty(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue);

#endif
