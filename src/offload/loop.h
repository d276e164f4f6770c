/*
 * The server's thread: it serves its clients, prefills, ends epochs, and rests. Without work it polls, then
 * naps, ever longer, and sleeps for good once nothing is left to purge. Where it has no CPU to itself it
 * switches the heap to shared mode, and back when the process leaves a CPU idle.
 */
#ifndef CALM_OFFLOAD_LOOP_H
#define CALM_OFFLOAD_LOOP_H

#include "offload/server.h"

/* The thread's function; its argument is the struct server. Ends when it is asked to stop, with the heap in
 * shared mode for good. */
void server_loop(void *server);

#endif
