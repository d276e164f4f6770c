/*
 * The clients' side of the server: what a thread does whose cache has no block, or no room.
 *
 * Any thread, at any time once the server was started; number says which endpoint is nearest, that of the
 * virtual CPU it runs on. None of these touches the heap.
 */
#ifndef CALM_OFFLOAD_CLIENT_H
#define CALM_OFFLOAD_CLIENT_H

#include "offload/server.h"

enum answer {
    ANSWER_DONE,
    ANSWER_LOST, /* the server is starved, or dead: the caller must serve itself, not from its heap */
    ANSWER_LENT, /* the heap is everybody's, by its locks: between client_borrow and client_return */
};

/* The heap is lent, and will be until client_return. NULL if it is not, or not any more. */
struct endpoint *client_borrow(struct server *server, unsigned number);
void client_return(struct endpoint *borrowed);

/* Blocks of a class: a magazine that is ready, or up to count that the server is asked for. *got is 0 if
 * memory is short. */
enum answer client_take(struct server *server, unsigned number, uint32_t class, void **blocks, size_t count,
                        size_t *got);

/* Freed blocks of a class go to the server, sooner or later. Never waits for it. False if the heap is lent.
 */
bool client_put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count);

/* A large block; NULL if memory is short. */
enum answer client_take_large(struct server *server, unsigned number, size_t pages, size_t align_pages,
                              unsigned flags, void **block, bool *zero);

bool client_put_large(struct server *server, unsigned number, void *block, size_t bytes);

/* Has the server run work(subject), after all that was sent to it from here before; kind is CALL_SHORT or
 * CALL_LONG. Waits for as long as it takes, while the server lives. */
enum answer client_run(struct server *server, unsigned number, enum call_kind kind,
                       void (*work)(void *subject), void *subject);

/* The printed scheme: see sync.h. */
enum answer client_take_sync(struct server *server, uint32_t class, void **block);
enum answer client_put_sync(struct server *server, uint32_t class, void *block);

/* The server was waited for in vain: until it is seen again nobody waits for it. */
void client_give_up(struct server *server);

/* Whether that is so. */
bool client_is_starved(struct server *server);

struct endpoint_sums {
    uint64_t hits;
    uint64_t misses;
};

/* Of all endpoints together, about. */
struct endpoint_sums client_counts(const struct server *server);

#endif
