/*
 * A request: what a thread wants of the heap that the server owns. The server does it; in shared mode, or on
 * the second heap, the thread itself.
 */
#ifndef CALM_OFFLOAD_REQUEST_H
#define CALM_OFFLOAD_REQUEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct governor;

enum request_kind {
    REQUEST_TAKE, /* blocks of a class, or a large one */
    REQUEST_PUT,
    REQUEST_RUN,      /* runs the client's function */
    REQUEST_RUN_LONG, /* the same; does not begin in the middle of other long work */
};

struct request {
    enum request_kind kind;
    /* REQUEST_TAKE, REQUEST_PUT */
    uint32_t class; /* 0: one large block */
    void **blocks;
    size_t count;              /* in: wanted, or freed; out: taken, 0 if memory is short */
    struct governor *governor; /* whose heap, where a client does it itself */
    /* A large block */
    size_t pages;
    size_t align_pages;
    size_t bytes; /* freed */
    bool zeroed;  /* for calloc */
    bool zero;    /* out: known to be zero */
    /* REQUEST_RUN, REQUEST_RUN_LONG; subject may lie on the client's stack */
    void (*work)(void *subject);
    void *subject;
};

/* A REQUEST_TAKE or REQUEST_PUT; the blocks of the latter are only read. */
static inline struct request request_for(enum request_kind kind, struct governor *governor, uint32_t class,
                                         void *const *blocks, size_t count) {
    void **writable = (void **)(uintptr_t)blocks;
    return (struct request){
        .kind = kind, .governor = governor, .class = class, .blocks = writable, .count = count};
}

static inline bool request_runs_work(const struct request *request) {
    return request->kind >= REQUEST_RUN;
}

#endif
