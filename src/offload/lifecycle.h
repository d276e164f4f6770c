/*
 * The server's start, its end, and forks. See loop.h for what the thread does in between.
 *
 * It is started once a process has worked on the heap so often that a thread is worth it; until then the heap
 * is in shared mode. Locks, outermost first: fork_lock, open_lock, the endpoints, the overflow's;
 * and the mailbox's, under which none is acquired.
 */
#ifndef CALM_OFFLOAD_LIFECYCLE_H
#define CALM_OFFLOAD_LIFECYCLE_H

#include "offload/server.h"

/* Starts the thread, once: it takes the heap as soon as it runs. Any thread; does nothing while another
 * thread forks. */
void server_start(struct server *server);

/* Has the server serve what was sent, and end; the heap is in shared mode for good then. False if the server
 * does not end within the timeout, or the caller interrupted itself while it held what the server waits for:
 * it ends later then. */
bool server_stop(struct server *server, uint64_t timeout_ns);

/* Around fork. Before: parks the server, and enters all endpoints; unless the server does not answer.
 * interrupts: whether a signal handler forks that interrupted its thread within the heap: then the child goes
 * without the server's heap. */
void server_before_fork(struct server *server, bool interrupts);
void server_after_fork(struct server *server, bool child);

#endif
