/*
 * The stock as the server sees it: what is made ready in the endpoints, on the predictor's word, and how it
 * and the spares go back.
 *
 * The server's thread alone, but for what says otherwise.
 */
#ifndef CALM_OFFLOAD_STOCK_H
#define CALM_OFFLOAD_STOCK_H

#include "offload/server.h"

/* How much of each class may be ready, and where it lies. Returns the words that an endpoint needs for it.
 */
uint32_t stock_prepare(struct server *server);

/* A client had to ask for blocks of a class, or for a large block: more is to be ready from now on. */
void stock_expect(struct server *server, struct endpoint *endpoint, uint32_t class);
void stock_expect_large(struct server *server, struct endpoint *endpoint, uint64_t pages);

/* What clients took of the stock since the last look. True if they took any. */
bool stock_scan(const struct server *server, struct endpoint *endpoint);

/* Makes one piece of what is expected ready, so that who calls meanwhile waits for no more than that. False
 * if there is nothing to do. */
bool stock_feed(struct server *server);

/* Ends the predictor's window: returns unwanted stock and spares to the heap. True if the endpoint still has
 * stock or spares, or expects demand: only the end of a later window can return those. */
bool stock_end_window(struct server *server, struct endpoint *endpoint);

/* Takes back all stock and spares, waiting for clients that are at them. */
void stock_withdraw_all(struct server *server);

/* Blocks that lie ready or in spares, a large one counting for its pages, and their bytes, about. Any thread.
 */
size_t stock_blocks(const struct server *server, size_t *bytes);

/* The most blocks, and bytes, that could lie there: a constant for each endpoint. Any thread. */
size_t stock_blocks_most(const struct server *server, size_t *bytes);

#endif
