/*
 * The switch between the two modes of the heap. Exclusive: the heap is the server's. Shared: any thread works
 * on it under its locks, while an endpoint counts that thread as inside; the server is one of them, and
 * purges.
 *
 * To shared mode: the server enters all endpoints, serves what was sent, changes the mode, and leaves. A
 * client reads the mode after it has entered, so what it sends is served before. To exclusive mode: the
 * server changes the mode, then waits until no thread is inside. A client counts itself before it reads the
 * mode, so either the server waits for it, or it finds the mode changed. tests/model/sharing.pml has the
 * proof.
 */
#ifndef CALM_OFFLOAD_HEAP_MODE_H
#define CALM_OFFLOAD_HEAP_MODE_H

#include "offload/server.h"

/* The server's thread. Each waits for the clients as above. */
void heap_mode_share(struct server *server, enum sharing sharing);
void heap_mode_take_exclusive(struct server *server);

/* The client's part: counts the caller as inside the heap. False, and not counted, if the mode is exclusive.
 */
bool heap_mode_enter(struct server *server, struct endpoint *endpoint);
void heap_mode_leave(struct endpoint *endpoint);

/* From HEAP_MODE_UNSET to shared mode, in a new process or in a child after fork. Serves what the parent's
 * clients had sent. Any thread; no effect in another mode. */
void server_begin(struct server *server);

#endif
