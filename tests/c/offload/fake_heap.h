/*
 * A server and clients on a heap that counts its blocks: it stands in for the arena's functions of the
 * same names. Each block is handed out once and returned once, whatever happens; its holder writes to it, so
 * that ThreadSanitizer sees whether it was handed over. Each test runs in a separate process.
 */
#ifndef CALM_TESTS_FAKE_HEAP_H
#define CALM_TESTS_FAKE_HEAP_H

#include <pthread.h>
#include <stdatomic.h>

#include "check.h"
#include "offload/client.h"
#include "offload/lifecycle.h"
#include "offload/loop.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "test_clock.h"

/* Of clients that are to wait for the server as long as it takes; and of those that are not to. */
#define LONG_TIMEOUT_NS  600000000000ULL
#define SHORT_TIMEOUT_NS 10000000ULL

extern struct server server;
extern struct size_classes classes;

/* ---- the heap ---- */

struct fake_heap {
    _Atomic(size_t) out; /* blocks that are not in it */
    _Atomic(uint64_t) takes;
    _Atomic(uint64_t) puts;
    _Atomic(bool) is_short; /* it has no block */
};

extern struct fake_heap heap;

/* A gate in the heap: who takes a block while it is closed waits there, with the block. */
void gate_close(void);
void gate_open(void);
bool gate_has_waiter(void);

/* Around fork, after server_before_fork: as the arena, it is whole in the child. */
void heap_before_fork(void);
void heap_after_fork(void);

/* ---- the server ---- */

extern _Atomic(bool) is_contended; /* what the server is told */
extern _Atomic(bool) has_room;
extern _Atomic(bool) refuses_threads;

/* A server with so many endpoints, whose client caches hold so much; it is not started. */
void set_up(unsigned endpoints, size_t cache_bytes, uint64_t timeout_ns);

/* Starts its thread, and waits until it serves. */
void launch(void);

/* Ends it. */
void stop_server(void);

/* Ends it, if there is one, and checks that all blocks are back. */
void finish(void);

/* ---- a client ---- */

struct held {
    uint32_t size_class; /* 0: a large block */
    size_t pages;
    size_t count;
    void *blocks[MAX_MAGAZINE_BLOCKS];
};

/* By the server. False if it did not answer. */
bool ask(unsigned number, struct held *held, uint32_t size_class, size_t pages);
/* By the server, or else from the heap. */
void obtain(unsigned number, struct held *held, uint32_t size_class, size_t pages);
/* To the server, or else to the heap. Returns whether it was the server. */
bool give_up(unsigned number, struct held *held);

size_t prepared_blocks(void);

#endif
