/*
 * Offload mode for the process's heap: whether there is to be a server, what it does, where it runs, and the
 * second heap for when it does not answer. See docs/offload.md.
 */
#ifndef CALM_API_OFFLOADING_H
#define CALM_API_OFFLOADING_H

#include "offload/client.h"

#include <stdbool.h>
#include <stdint.h>

enum offloading { OFFLOADING_NONE, OFFLOADING_ON, OFFLOADING_SYNC };

extern struct server calm_server __attribute__((visibility("hidden")));

/* Before the allocator is ready: decides, and says so if it declines what was asked for. */
enum offloading offloading_choose(void);

/* After the governor is there: the heap is the server's from now on. False if memory is short. */
bool offloading_prepare(void);

/* The mode, as it was chosen. */
enum offloading offloading_mode(void);

/* Whether the server makes so large a block resident for a calloc; else who wants it does: as long as it
 * takes, nobody else is served. */
bool offloading_populates(size_t pages);

/* The second heap's governor: made when it is first wanted (NULL if memory is short), or only if it was. */
struct governor *offloading_second(void);
struct governor *offloading_second_if_made(void);

/* Around fork, outside the governor's. */
void offloading_before_fork(void);
void offloading_after_fork(bool child);

/* Whether the caller is a signal handler that interrupted what the allocator's threads may wait for. */
bool offloading_is_held(void);

/* The same, and whether it interrupted a client: then the server may wait for the caller. */
bool offloading_interrupts_client(void);

/* The server ends, and the heap is served without it from now on. Waits for so long at most. */
void offloading_retire(uint64_t patience_ns);

/* At the process's end, after the last report. */
void offloading_end(void);

#endif
