/*
 * The clients' side of the server: what a thread does whose CPU cache has no block, or no room.
 *
 * Any thread, at any time once the server was initialized; number selects the endpoint, that of the virtual
 * CPU that runs the caller. None works on the heap, except that the first request of a new or forked process
 * begins shared mode (heap_mode_begin). In shared mode the caller works on it itself.
 */
#ifndef CALM_OFFLOAD_CLIENT_H
#define CALM_OFFLOAD_CLIENT_H

#include "offload/server.h"

enum answer {
    ANSWER_DONE,
    ANSWER_UNRESPONSIVE, /* the caller must serve itself, but not from the server's heap */
    ANSWER_SHARED, /* the caller may work on the heap, between client_enter_shared and client_leave_shared */
};

/* Whether the server can be asked: ANSWER_DONE, else what client_ask would answer. */
enum answer client_check(struct server *server);

/* In shared mode: the heap stays so until client_leave_shared. NULL in exclusive mode. */
struct endpoint *client_enter_shared(struct server *server, unsigned number);
void client_leave_shared(struct endpoint *endpoint);

/*
 * Has the server do what is requested.
 *
 * REQUEST_TAKE: takes what is prepared, or else up to count blocks that the server is asked for.
 * REQUEST_PUT: sends freed blocks, and waits only for room, where ring and overflow are full: up to the
 * timeout, after which the blocks stay in use for good. Never ANSWER_UNRESPONSIVE. REQUEST_RUN,
 * REQUEST_RUN_LONG: runs work(subject), after all that the caller sent before. Waits as long as it takes,
 * while the server makes progress.
 */
enum answer client_ask(struct server *server, unsigned number, struct request *request);

struct endpoint_sums {
    uint64_t hits;
    uint64_t misses;
};

/* Of all endpoints together, about. */
struct endpoint_sums client_counts(const struct server *server);

#endif
