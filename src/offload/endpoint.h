/*
 * An endpoint: what passes between the clients on one virtual CPU and the server.
 *
 * To the server, in order, through a ring: magazines and large blocks that were freed, what was taken from
 * the stock, and calls. To the clients the stock: for each size class magazines, and for a few sizes large
 * blocks, that the predictor had made ready. The stock's queues are single-producer and single-consumer as
 * the ring is: of each, the server counts what it put, the clients what they took.
 *
 * The client's side of everything belongs to whoever holds the endpoint's lock; who finds it held goes to
 * another endpoint. So there are as many as CPUs, however many threads; none is anybody's for good, and a
 * thread that ends leaves nothing behind. The server takes the lock to withdraw stock.
 */
#ifndef CALM_OFFLOAD_ENDPOINT_H
#define CALM_OFFLOAD_ENDPOINT_H

#include "heap/size_class.h"
#include "offload/predictor.h"
#include "offload/ring.h"
#include "os/lock.h"

#define STOCK_MAGAZINES 8
#define LARGE_PLACES    16
#define LARGE_BLOCKS    4

/* What stock one endpoint may hold: a small block counts as STOCK_CHARGE_LEAST, for the page that it may
 * keep. */
#define STOCK_BYTES_MOST   ((size_t)4 << 20)
#define STOCK_CHARGE_LEAST 512

#define CLASS_WORDS ((SIZE_CLASSES + 63) / 64)

enum record { RECORD_FREE, RECORD_FREE_LARGE, RECORD_TOOK, RECORD_TOOK_LARGE, RECORD_CALL };

/* A record's first word. */
static inline uint64_t record_header(enum record kind, uint32_t subject, size_t count) {
    return (uint64_t)kind | (uint64_t)subject << 8 | (uint64_t)count << 32;
}

static inline enum record record_kind(uint64_t header) {
    return (enum record)(header & 0xff);
}

static inline uint32_t record_subject(uint64_t header) {
    return (uint32_t)(header >> 8 & 0xffffff);
}

static inline size_t record_count(uint64_t header) {
    return (size_t)(header >> 32);
}

/* A large block that is ready. */
struct ready_block {
    void *block;
    uint64_t pages;
    bool zero;
};

struct large_stock {
    _Alignas(64) _Atomic(uint32_t) put;
    uint64_t pages; /* the server's: of what it puts here */
    struct predictor predictor;
    _Alignas(64) _Atomic(uint32_t) taken;
    _Alignas(64) struct ready_block ready[LARGE_BLOCKS];
};

struct endpoint_counts {
    uint64_t hits;   /* served from the stock */
    uint64_t misses; /* there was nothing ready */
    uint64_t full;   /* freed past the ring, which had no room */
};

/* The same, written under the endpoint's lock and read at any time. */
struct endpoint_counters {
    _Atomic(uint64_t) hits, misses, full;
};

struct endpoint {
    /* The clients', under the lock. */
    _Alignas(64) struct lock lock;
    uint64_t sent_bytes; /* of freed blocks */
    struct endpoint_counters counts;
    _Alignas(64) _Atomic(uint32_t) taken[SIZE_CLASSES];

    /* The server's. */
    _Alignas(64) _Atomic(uint64_t) served_bytes;
    _Alignas(64) _Atomic(uint32_t) put[SIZE_CLASSES];
    struct predictor predictors[SIZE_CLASSES];
    uint8_t level_seen[SIZE_CLASSES];
    uint8_t large_seen[LARGE_PLACES];
    uint64_t hungry[CLASS_WORDS]; /* classes that may have less ready than they should */
    uint64_t active[CLASS_WORDS]; /* classes of which anything is expected */
    uint32_t large_hungry;
    size_t stock_bytes; /* that are ready, by the levels seen last */

    struct large_stock large[LARGE_PLACES];
    struct ring ring;
    void *slots[]; /* of class c from start_of[c] on: STOCK_MAGAZINES times its batch */
};

/* Which place blocks of so many pages have. */
static inline uint32_t large_place(uint64_t pages) {
    return (uint32_t)(pages * 0x9e3779b97f4a7c15ULL >> 60) % LARGE_PLACES;
}

#endif
