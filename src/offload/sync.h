/*
 * The clients of the mailbox (mailbox.h), in offload mode with test_sync: each malloc and each free is one
 * message.
 */
#ifndef CALM_OFFLOAD_SYNC_H
#define CALM_OFFLOAD_SYNC_H

#include "offload/client.h"

/* Takes or puts one block of a class. Waits for the server's answer. */
enum answer client_ask_sync(struct server *server, struct request *request);

#endif
