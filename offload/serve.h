/* Serving: what the server does with the records and calls of its clients. The
 * thread that holds the server's lock. */
#ifndef CALM_OFFLOAD_SERVE_H
#define CALM_OFFLOAD_SERVE_H

#include "offload/server.h"

/* Serves what all clients have sent up to now. True if there was anything. */
bool server_serve(struct server *server);

/* Serves what was sent, and returns all prepared and cached blocks to the heap.
 * An endpoint in which another thread stays longer than so many naps is left
 * out. */
void server_drain(struct server *server, unsigned max_naps);

/* The same for a thread that does not hold the lock, and waits for it no longer
 * than the timeout. */
void server_flush(struct server *server, uint64_t timeout_ns);

/* Serves what all clients have sent up to now, for a thread that does not hold
 * the lock, and waits for it no longer than the timeout. */
void server_catch_up(struct server *server, uint64_t timeout_ns);

#endif
