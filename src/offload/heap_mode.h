/*
 * The switch between the two modes of the heap. Exclusive: the heap is the server's. Shared: any thread works
 * on it under its locks, while an endpoint counts that thread as inside; the server is one of them, and
 * purges.
 *
 * To shared mode: the server enters all endpoints, serves what was sent, changes the mode, and leaves. A
 * client reads the mode after it has entered, so what it sends is served before. To exclusive mode: the
 * server changes the mode, then waits until no thread is inside. A client counts itself before it reads the
 * mode, so either the server waits for it, or it finds the mode changed (client_enter_shared).
 * tests/model/sharing.pml has the proof.
 */
#ifndef CALM_OFFLOAD_HEAP_MODE_H
#define CALM_OFFLOAD_HEAP_MODE_H

#include "offload/server.h"

/* The server's thread. Each waits for the clients as above. */
void heap_mode_share(struct server *server, enum governor_mode mode);
void heap_mode_take_exclusive(struct server *server);

/* From HEAP_MODE_UNSET to shared mode, in a new process or in a child after fork. Serves what the parent's
 * clients had sent. Any thread; no effect in another mode. */
void heap_mode_begin(struct server *server);

#endif
