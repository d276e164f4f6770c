/*
 * A backend: how a thread reaches its governor's heap. A table of functions, chosen once at the start:
 * backend_direct.c works on the heap under its locks; offload/backend_offload.c has a server thread do so.
 * Where the heap's memory comes from is none of its business (os/vm.h).
 *
 * Thread-safe. NULL and 0 mean that memory is short. The caller holds no lock of the allocator, unless it is
 * a signal handler that interrupted a thread that does.
 */
#ifndef CALM_BACKEND_BACKEND_H
#define CALM_BACKEND_BACKEND_H

#include "governor/state.h"

#include <stdbool.h>
#include <stddef.h>

struct calm_stats;

/* Work on a heap. */
typedef void heap_work(struct governor *governor, void *subject);

struct taken {
    size_t count;
    bool cacheable; /* other blocks go back to the backend, never into a cache */
};

/* What a signal handler may have interrupted in its own thread. */
enum interrupted {
    INTERRUPTED_NOTHING,
    INTERRUPTED_CLIENT, /* a call that a server may be about to answer; it waits for nothing of the thread */
    INTERRUPTED_HOLDER, /* a section that other threads may wait for */
};

struct backend {
    const struct backend_functions *functions;
    struct governor *governor; /* of the heap that the caches are in front of */
    bool has_server;           /* or may soon have one */
};

struct backend_functions {
    /* Blocks of one class: 1 to MAX_MAGAZINE_BLOCKS. Those that are put are all of one heap. */
    struct taken (*take_blocks)(struct backend *backend, uint32_t class, void **blocks, size_t count);
    void (*put_blocks)(struct backend *backend, uint32_t class, void *const *blocks, size_t count);

    /* A block of whole pages. zeroed: the caller needs zeros, and may get a resident block, if it is small
     * beside what is used. *zero: whether it is known to be zero. */
    void *(*take_large)(struct backend *backend, size_t pages, size_t align_pages, bool zeroed, bool *zero);
    void (*put_large)(struct backend *backend, void *block);
    /* Where the block is now; NULL if it cannot be resized in place or by moving its pages. */
    void *(*resize_large)(struct backend *backend, void *block, size_t pages);

    /* The heap that a block lies in, as far as its address tells; NULL if it is in none. */
    struct heap *(*heap_of)(struct backend *backend, const void *block);

    /* Runs work(governor, subject) for each heap, where it may read and change all of it, after what the
     * caller freed. Returns false if the first heap's server does not answer: then work did not run for that
     * heap. */
    bool (*run)(struct backend *backend, heap_work *work, void *subject);

    /* Purges all but keep_bytes of free memory; returns the bytes purged. trim_by_helper: for the thread that
     * calls governor->visited. */
    size_t (*trim)(struct backend *backend, size_t keep_bytes);
    size_t (*trim_by_helper)(struct backend *backend, size_t keep_bytes);

    /* Adds what this backend alone counts. Called as by run, for the first heap. */
    void (*add_counters)(const struct backend *backend, struct calm_stats *stats);

    enum interrupted (*interrupted)(const struct backend *backend);

    /* Around fork: in between, no other thread is within a heap or a cache. */
    void (*before_fork)(struct backend *backend);
    void (*after_fork)(struct backend *backend, bool child);

    /* Ends the allocator's threads; none starts before helper_resume. Waits for the timeout at most; false if
     * one is left, which ends as soon as it can. */
    bool (*stop_threads)(struct backend *backend, uint64_t timeout_ns);

    /* The process ends: later calls are served without threads. */
    void (*end)(struct backend *backend);
};

/* Makes the backend that works on the governor's heap itself. */
void backend_direct_open(struct backend *backend, struct governor *governor);

#endif
