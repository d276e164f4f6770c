/*
 * The clients' side of the server: what a thread does whose CPU cache has no block, or no room.
 *
 * Any thread, at any time once the server was initialized; number selects the endpoint, that of the virtual
 * CPU that runs the caller. None of these functions works on the heap.
 */
#ifndef CALM_OFFLOAD_CLIENT_H
#define CALM_OFFLOAD_CLIENT_H

#include "offload/server.h"

enum answer {
    ANSWER_DONE,
    ANSWER_UNRESPONSIVE, /* the caller must serve itself, but not from the server's heap */
    ANSWER_SHARED, /* the caller may work on the heap, between client_enter_shared and client_leave_shared */
};

/* In shared mode: the heap stays so until client_leave_shared. NULL in exclusive mode. */
struct endpoint *client_enter_shared(struct server *server, unsigned number);
void client_leave_shared(struct endpoint *endpoint);

/* Blocks of a class: what is prepared, or up to count that the server is asked for. *got is 0 if memory is
 * short. */
enum answer client_take(struct server *server, unsigned number, uint32_t class, void **blocks, size_t count,
                        size_t *got);

/* Sends freed blocks of a class to the server; never waits for it. False if the heap is in shared mode. */
bool client_put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count);

/* A large block; NULL if memory is short. */
enum answer client_take_large(struct server *server, unsigned number, size_t pages, size_t align_pages,
                              unsigned flags, void **block, bool *zero);

bool client_put_large(struct server *server, unsigned number, void *block, size_t bytes);

/* Has the server run work(subject), after all that the caller sent before; kind is CALL_SHORT or CALL_LONG.
 * Waits as long as it takes, while the server makes progress. */
enum answer client_run(struct server *server, unsigned number, enum call_kind kind,
                       void (*work)(void *subject), void *subject);

struct endpoint_sums {
    uint64_t hits;
    uint64_t misses;
};

/* Of all endpoints together, about. */
struct endpoint_sums client_counts(const struct server *server);

#endif
