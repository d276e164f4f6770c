/*
 * The server's thread: it serves its clients, prefills, ends epochs, and rests.
 * Without work it polls, then naps, ever longer, and sleeps for good once
 * nothing is left to return to the heap. Where it has no CPU to itself it stops
 * serving for a time, in which clients work on the heap themselves.
 */
#ifndef CALM_OFFLOAD_LOOP_H
#define CALM_OFFLOAD_LOOP_H

#include "offload/server.h"

/* Whether the server's thread is to end, and none may start. */
bool server_is_stopped(const struct server *server);

/* The thread's function; its argument is the struct server. */
void server_loop(void *server);

#endif
