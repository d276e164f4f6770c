/*
 * The library libcalmoffload: what its copy of src/api calls in place of
 * functions of the arena (redirect.h), with the same signatures. See README.md.
 */
#ifndef CALM_OFFLOAD_OFFLOAD_H
#define CALM_OFFLOAD_OFFLOAD_H

#include "api/counters.h"
#include "arena/arena.h"
#include "arena/blocks.h"
#include "arena/flush.h"
#include "arena/helper.h"
#include "arena/large.h"
#include "offload/server.h"

struct offload {
    struct server server;
    bool has_server; /* or may have one: there is a CPU for it, and memory */
    bool sync;       /* each malloc and free is one message: the printed scheme, for comparison */
    unsigned
        held_forks; /* a bit for each nested fork, the latest the lowest: what server_before_fork returned */
    void (*misused)(const struct misuse_record *misuse); /* reports, on a thread of the program */
    struct miss_counter direct[MISS_COUNTERS];           /* times that a thread worked on the heap itself */
};

/* The process's instance. */
extern struct offload calm_offload __attribute__((visibility("hidden")));

extern __typeof__(cpu_caches_start) offload_caches_start;
extern __typeof__(arena_after_fork) offload_after_fork;
extern __typeof__(arena_before_fork) offload_before_fork;
extern __typeof__(arena_cached) offload_cached;
extern __typeof__(helper_end) offload_end;
extern __typeof__(arena_init) offload_init;
extern __typeof__(arena_is_held) offload_is_held;
extern __typeof__(arena_max_cached) offload_max_cached;
extern __typeof__(arena_put_blocks) offload_put_blocks;
extern __typeof__(arena_put_large) offload_put_large;
extern __typeof__(arena_start_child) offload_start_child;
extern __typeof__(arena_take_blocks) offload_take_blocks;
extern __typeof__(arena_take_large) offload_take_large;
extern __typeof__(arena_trim) offload_trim;
extern __typeof__(arena_trim_by_helper) offload_trim_by_helper;
extern __typeof__(helper_exists) offload_helper_exists;
extern __typeof__(helper_stop) offload_stop_threads;
/* In report.c's place of counters_print. */
extern __typeof__(counters_print) offload_counters_print;
/* In calm.c's and mallinfo.c's place of counters_fill: the server first serves
 * what the program has freed. */
extern __typeof__(counters_fill) offload_counters_fill;

#endif
