/*
 * The clients of the mailbox (mailbox.h), with test_sync: each malloc and each
 * free is one message.
 */
#ifndef CALM_OFFLOAD_SYNC_H
#define CALM_OFFLOAD_SYNC_H

#include "offload/client.h"

/* Has the server take a block of a class, or put it if *block is not NULL.
 * False if it did not: it does not serve, is late, or finds no memory. Waits
 * for the server's answer. */
bool client_ask_sync(struct server *server, uint32_t size_class, void **block);

#endif
