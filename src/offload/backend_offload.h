/*
 * The offload backend: a server thread works on the heap, and a second heap serves while the server does not
 * answer. It decides whether there is to be a server, what it does on the heap, and where it runs. See
 * docs/offload.md.
 */
#ifndef CALM_OFFLOAD_BACKEND_OFFLOAD_H
#define CALM_OFFLOAD_BACKEND_OFFLOAD_H

#include "backend/backend.h"
#include "offload/affinity.h"
#include "offload/server.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

struct offload_options {
    bool sync; /* each malloc and free is one message: the printed scheme, for comparison */
    struct affinity_request cpu;
    unsigned timeout_ms; /* that a thread waits for the server before it uses the second heap */
};

struct offload {
    struct backend backend;
    struct offload_options options;
    struct server server;
    struct heap_ops heap_ops;
    struct affinity_survey survey; /* the server's own, once it runs */
    bool reported;                 /* that the requested CPU cannot be had */

    struct governor second;
    struct cpu_caches no_caches; /* of the second heap */
    struct lock second_lock;
    _Atomic(int) second_made; /* 1; -1: there is no memory for it */
};

/* The process's instance. */
extern struct offload calm_offload __attribute__((visibility("hidden")));

/* Whether there is a CPU for a server; if not, reports why. Before offload_open, and before any thread of the
 * allocator. */
bool offload_is_possible(struct offload *offload);

/* From now on the governor's heap is the server's. NULL if memory is short. */
struct backend *offload_open(struct offload *offload, const struct offload_options *options,
                             struct governor *governor);

#endif
