/*
 * The clients of the mailbox (mailbox.h), in offload mode with test_sync: each malloc and each free is one
 * message.
 */
#ifndef CALM_OFFLOAD_SYNC_H
#define CALM_OFFLOAD_SYNC_H

#include "offload/client.h"

/* A block of a class, NULL if memory is short; or frees one. Waits for the server's answer. */
enum answer client_take_sync(struct server *server, uint32_t class, void **block);
enum answer client_put_sync(struct server *server, uint32_t class, void *block);

#endif
