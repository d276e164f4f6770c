/*
 * The server's start, its end, and forks. See loop.h for what the thread does
 * in between.
 *
 * It is started once clients have worked on the heap so often that a thread is
 * worth it. It ends with the process, and around calls that change the
 * process's privileges.
 */
#ifndef CALM_OFFLOAD_LIFECYCLE_H
#define CALM_OFFLOAD_LIFECYCLE_H

#include "offload/server.h"

/* A client works on the heap: starts the thread where one is missing. Any
 * thread; it starts none while another thread forks. */
void server_note_operation(struct server *server);

/* Waits until the thread, which finds that it is to end (server_is_stopped),
 * has served what was sent, and is gone. False if that takes longer than the
 * timeout: it ends later then. */
bool server_stop(struct server *server, uint64_t timeout_ns);

/*
 * Around fork. Before: waits until the server is between two passes, and enters
 * all endpoints, so that the child finds all of their blocks. interrupts:
 * whether a signal handler forks that interrupted its thread within the arena:
 * then the server may wait for that thread, and nothing is waited for. Returns
 * whether the server is held, which the functions for after the fork need. If
 * not, also because the server took too long, the child forgets what is in
 * endpoints: those blocks stay in use for good.
 */
bool server_before_fork(struct server *server, bool interrupts);
void server_after_fork_in_parent(struct server *server, bool held);
void server_start_child(struct server *server, bool held);

#endif
