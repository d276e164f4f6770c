/*
 * An endpoint: what passes between the clients on one virtual CPU and the server.
 *
 * To the server, in order, through a ring: magazines and large blocks that were freed, and calls. To the
 * clients the stock: for each size class magazines, and for a few sizes large blocks, that the predictor had
 * made ready. The stock's queues are single-producer and single-consumer as the ring is: of each, the server
 * counts what it put, the clients what they took, and by that the server sees it.
 *
 * The client's side of everything belongs to whoever is in the endpoint; who finds it taken goes to another
 * one. So there are as many as CPUs, however many threads; none is anybody's for good, and a thread that ends
 * leaves nothing behind. The server enters to withdraw stock.
 */
#ifndef CALM_OFFLOAD_ENDPOINT_H
#define CALM_OFFLOAD_ENDPOINT_H

#include "heap/size_class.h"
#include "offload/predictor.h"
#include "offload/ring.h"
#include "os/lock.h"

#define STOCK_MAGAZINES 32 /* of a class, at most */
#define LARGE_PLACES    16
#define LARGE_BLOCKS    8

/* What stock one endpoint may hold, but that each class may have one magazine; and what of one class. A small
 * block counts as STOCK_CHARGE_LEAST, for the page that it may keep. */
#define STOCK_BYTES_MOST   ((size_t)12 << 20)
#define STOCK_CLASS_BYTES  ((size_t)256 << 10)
#define STOCK_CHARGE_LEAST 512

/* What the spare of a class may hold. */
#define SPARE_CLASS_BYTES ((size_t)64 << 10)

#define CLASS_WORDS ((SIZE_CLASSES + 63) / 64)

enum record {
    RECORD_FREE,
    RECORD_FREE_LARGE,
    RECORD_CALL,
    RECORD_LONG_CALL, /* not begun between two pieces of other long work */
};

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

/*
 * A place in a queue of the stock says by itself that it is filled, and for the how manieth time, so that a
 * client fetches no other line of the server's: one more than the number of what lies there.
 */
struct magazine {
    _Atomic(uint64_t) filled;
    void *blocks[];
};

/* A large block that is ready. */
struct ready_block {
    _Atomic(uint64_t) filled;
    void *block;
    uint64_t pages;
    bool zero;
};

struct large_stock {
    _Alignas(64) _Atomic(uint32_t) put;
    _Atomic(uint64_t) pages; /* the server's: of what it puts here */
    struct predictor predictor;
    _Alignas(64) _Atomic(uint32_t) taken;
    _Alignas(64) struct ready_block ready[LARGE_BLOCKS];
};

/* Written by who is in the endpoint, read at any time. */
struct endpoint_counts {
    _Atomic(uint64_t) hits;   /* served from the stock */
    _Atomic(uint64_t) misses; /* there was nothing ready */
};

/* Blocks of a class that wait for who wants them again: see spare.h. */
struct spare {
    _Atomic(uint32_t) count;
    uint32_t least; /* since the window began */
};

struct endpoint {
    _Alignas(64) _Atomic(uint32_t) borrowers; /* threads that are at the heap while it is lent */
    _Atomic(uint64_t) borrower;               /* the thread pointer of the last of them */
    /* The clients'; who is in. */
    _Alignas(64) _Atomic(uint64_t) entered; /* 0, or the thread pointer of who is in */
    uint64_t sent_bytes;                    /* of freed blocks */
    uint64_t served_seen;                   /* of served_bytes, when it was looked at last */
    struct endpoint_counts counts;
    _Alignas(64) _Atomic(uint32_t) taken[SIZE_CLASSES];
    struct spare spares[SIZE_CLASSES];

    /* The server's. */
    _Alignas(64) _Atomic(uint64_t) served_bytes;
    _Alignas(64) _Atomic(uint32_t) put[SIZE_CLASSES];
    struct predictor predictors[SIZE_CLASSES];
    uint8_t level_seen[SIZE_CLASSES];
    uint8_t large_seen[LARGE_PLACES];
    uint64_t hungry[CLASS_WORDS]; /* classes that may have less ready than they should */
    uint64_t active[CLASS_WORDS]; /* classes of which anything is expected */
    uint32_t large_hungry;
    uint32_t large_active;
    size_t stock_bytes; /* that are ready, by the levels seen last */

    struct large_stock large[LARGE_PLACES];
    struct ring ring;
    uint64_t words[]; /* magazines of class c from word start_of[c] on, its spare from spare_start[c] on */
};

/*
 * Enters; false if somebody is in. Who leaves stores no more than a word, and waits for nothing that it has
 * stored before to arrive; a lock that could be slept on would.
 */
static inline bool endpoint_try(struct endpoint *endpoint) {
    uint64_t expected = 0;
    return atomic_load_explicit(&endpoint->entered, memory_order_relaxed) == 0 &&
           atomic_compare_exchange_strong_explicit(&endpoint->entered, &expected, lock_self(),
                                                   memory_order_acquire, memory_order_relaxed);
}

static inline void endpoint_leave(struct endpoint *endpoint) {
    atomic_store_explicit(&endpoint->entered, 0, memory_order_release);
}

/* Whether the caller is at the lent heap from here, as far as can be told. */
static inline bool endpoint_is_borrowed_by_me(const struct endpoint *endpoint) {
    return atomic_load_explicit(&endpoint->borrowers, memory_order_relaxed) != 0 &&
           atomic_load_explicit(&endpoint->borrower, memory_order_relaxed) == lock_self();
}

/* Whether the caller is in. */
static inline bool endpoint_is_mine(const struct endpoint *endpoint) {
    return atomic_load_explicit(&endpoint->entered, memory_order_relaxed) == lock_self();
}

/* Waits until nobody is in: for a few instructions of another thread, which may have to get a CPU first. */
void endpoint_enter(struct endpoint *endpoint);

/* What lies there, and is to: the size is the server's to change. Any thread. */
static inline uint64_t large_pages(const struct large_stock *stock) {
    return atomic_load_explicit(&stock->pages, memory_order_relaxed);
}

/* Which place blocks of so many pages have: sizes that are near each other have different ones. */
static inline uint32_t large_place(uint64_t pages) {
    return (uint32_t)(pages % LARGE_PLACES);
}

#endif
