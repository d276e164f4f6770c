/*
 * Serving: what the server does with the records and calls of its clients. The server's thread alone, in
 * exclusive mode; also a thread that acts in its place while there is no server (heap_mode_begin).
 *
 * Nested: a hook that does long work, such as a purge, calls server_serve_between, which serves clients and
 * so calls hooks.
 */
#ifndef CALM_OFFLOAD_SERVE_H
#define CALM_OFFLOAD_SERVE_H

#include "offload/server.h"

/* Serves what all clients have sent up to now. True if there was anything. */
bool server_serve(struct server *server);

/* The same between two parts of long work, so that clients need not wait for the end of it. Calls for other
 * long work are deferred. */
void server_serve_between(struct server *server);

bool server_has_deferred(const struct server *server);

#endif
