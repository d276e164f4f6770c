/*
 * What the server keeps ready in the endpoints' prefill queues, as the
 * predictors say; and how unused magazines, large blocks and client caches go
 * back to the heap.
 *
 * The thread that holds the server's lock, except where noted.
 */
#ifndef CALM_OFFLOAD_PREFILL_H
#define CALM_OFFLOAD_PREFILL_H

#include "offload/client_cache.h"
#include "offload/prefill_queue.h"
#include "offload/server.h"

/* An endpoint's queues hold at most this much, apart from one magazine of each
 * class. */
#define MAX_PREFILL_BYTES ((size_t)12 << 20)

/* A client's call was for what a queue may have: predicts more of it. */
void prefill_missed(struct server *server, struct endpoint *endpoint, const struct request *request);

/* Tells the predictors what clients took since the last time. True if they took
 * any. */
bool prefill_sample(const struct server *server, struct endpoint *endpoint);

/* Puts one magazine or large block into a queue below its target: no more, as
 * clients may be waiting. False if there is nothing to do. */
bool prefill_one(struct server *server);

/* Ends the epoch: returns what was unused to the heap. True if the endpoint
 * still has blocks, or predictions: those need the end of a later epoch. */
bool prefill_end_epoch(struct server *server, struct endpoint *endpoint);

/* Returns all of an endpoint's blocks to the heap, and forgets its predictions.
 * The caller has entered. */
void prefill_withdraw(struct server *server, struct endpoint *endpoint);

/* The blocks in queues and client caches, where a large one counts as its
 * pages, and their bytes. Any thread; then approximate. */
size_t prefill_blocks(const struct server *server, size_t *bytes);

/* Their bounds: a constant for each open endpoint. Any thread. */
size_t prefill_max_blocks(const struct server *server, size_t *bytes);

#endif
