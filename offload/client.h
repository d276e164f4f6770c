/*
 * The clients' side of the server: what a thread does whose CPU cache has no
 * block, or no room.
 *
 * Any thread, at any time once the server was initialized. number selects the
 * endpoint, that of the virtual CPU that runs the caller. Where a function says
 * that the server did not do it, the caller does it itself.
 */
#ifndef CALM_OFFLOAD_CLIENT_H
#define CALM_OFFLOAD_CLIENT_H

#include "offload/server.h"

/* Takes what is prepared, or else up to count blocks that the server is asked
 * for. Returns how many; 0 if the server does not serve, is late, or finds no
 * memory. */
size_t client_take(struct server *server, unsigned number, struct request *request);

/* Sends freed blocks to the server. False if it does not serve, or has no
 * room. */
bool client_put(struct server *server, unsigned number, const struct request *request);

struct endpoint_sums {
    uint64_t hits;
    uint64_t misses;
};

/* The sums over all endpoints, about. */
struct endpoint_sums client_counts(const struct server *server);

#endif
