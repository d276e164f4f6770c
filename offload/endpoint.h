/*
 * An endpoint: all that passes between the server and the clients on one
 * virtual CPU. To the server, in order, through a ring; to the clients, through
 * prefill queues (prefill_queue.h). It also has their client caches.
 *
 * The client's side belongs to the thread that has entered: a client, which
 * takes another endpoint if this one is taken, or the server when it returns
 * what is unused. So there are as many as CPUs, and a thread that ends leaves
 * nothing behind. A thread that has entered waits for nothing before it leaves.
 * The server's side belongs to the thread that holds the server's lock.
 */
#ifndef CALM_OFFLOAD_ENDPOINT_H
#define CALM_OFFLOAD_ENDPOINT_H

#include "base/size_class.h"
#include "offload/bits.h"
#include "offload/predictor.h"
#include "offload/request.h"
#include "offload/ring.h"
#include "os/lock.h"

/* Prefill queues: one for each size class, numbered as the classes, and then
 * these for large blocks. */
#define LARGE_QUEUES       16
#define LARGE_QUEUE_BLOCKS 8
#define QUEUES             (SIZE_CLASSES + LARGE_QUEUES)
#define QUEUE_WORDS        BITS_WORDS(QUEUES)

/*
 * A record's first word has its kind, the class or the call's slot, and the
 * number of words that follow. RECORD_PUT: the freed blocks; of class 0 a large
 * one, and its size. RECORD_CALL: none.
 */
enum record_kind { RECORD_PUT, RECORD_CALL };

static inline uint64_t record_header(enum record_kind kind, uint32_t subject, size_t count) {
    return (uint64_t)kind | (uint64_t)subject << 8 | (uint64_t)count << 32;
}

static inline enum record_kind record_kind_of(uint64_t header) {
    return (enum record_kind)(header & 0xff);
}

static inline uint32_t record_subject(uint64_t header) {
    return (uint32_t)(header >> 8 & 0xffffff);
}

struct prefilled_block {
    void *block;
    uint64_t pages;
    bool zero;
};

/* What a slot of a prefill queue holds: a magazine, or a large block. */
union prefill_item {
    void *blocks[MAX_MAGAZINE_BLOCKS];
    struct prefilled_block large;
};

/*
 * `filled` is one more than the index of the item: so a client sees whether the
 * slot is filled anew without reading another of the server's cache lines. The
 * slots of a queue have as much of the item as it needs.
 */
struct prefill_slot {
    _Atomic(uint64_t) filled;
    union prefill_item item;
};

struct client_cache {
    _Atomic(uint32_t) count;
    uint32_t min_count; /* in this epoch */
};

/* Where the slots of a prefill queue lie in `words`. */
struct queue_layout {
    uint32_t start;
    uint16_t content_words; /* of a slot */
    uint16_t blocks;        /* in a slot */
    uint8_t depth;          /* slots; a power of two */
    uint8_t max_ready;      /* to prepare */
};

/* Where the parts lie in `words`, and their bounds. The same for all
 * endpoints. */
struct endpoint_layout {
    const struct size_classes *classes;
    uint32_t words; /* in all */
    struct queue_layout queues[QUEUES];
    uint32_t cache_start[SIZE_CLASSES];
    uint16_t max_cached[SIZE_CLASSES]; /* blocks */
};

struct endpoint {
    const struct endpoint_layout *layout;
    struct endpoint *next; /* the one that was opened before */

    /* The thread that has entered. Others may read the counters. */
    _Alignas(64) _Atomic(uint64_t) entered; /* its thread pointer, and ENTERED_FOR_FORK; or 0 */
    uint64_t sent_bytes;                    /* freed */
    uint64_t served_seen;                   /* served_bytes, when last read */
    _Atomic(uint64_t) hits;                 /* requests served from a prefill queue */
    _Atomic(uint64_t) misses;
    _Alignas(64) _Atomic(uint32_t) taken[QUEUES];
    struct client_cache caches[SIZE_CLASSES];

    /* The thread that holds the server's lock. */
    _Alignas(64) _Atomic(uint64_t) served_bytes;
    _Alignas(64) _Atomic(uint32_t) put[QUEUES];
    struct predictor predictors[QUEUES];
    uint8_t seen_level[QUEUES];
    uint64_t below_target[QUEUE_WORDS]; /* queues that may need prefilling */
    uint64_t predicted[QUEUE_WORDS];    /* queues with a target, or content */
    size_t prefilled_bytes;             /* by seen_level */
    _Atomic(uint64_t) large_pages[LARGE_QUEUES];

    struct ring ring;
    uint64_t words[]; /* slots and client caches, as the layout says */
};

/*
 * Enters; false if another thread is in. A plain word and not a lock that can
 * be slept on: to leave is one store, which waits for no earlier store to
 * complete.
 */
static inline bool endpoint_try(struct endpoint *endpoint) {
    uint64_t expected = 0;
    return atomic_load_explicit(&endpoint->entered, memory_order_relaxed) == 0 &&
           atomic_compare_exchange_strong_explicit(&endpoint->entered, &expected, lock_self(),
                                                   memory_order_acquire, memory_order_relaxed);
}

/* For a thread that waits for another one, which a futex does not tell that it
 * is done. */
#define ENDPOINT_NAP_NS 50000ULL
void endpoint_nap(void);

/* Enters, after a wait for the few instructions of another thread, which may
 * first have to get a CPU. False after max_naps naps. */
bool endpoint_enter(struct endpoint *endpoint, unsigned max_naps);

static inline void endpoint_leave(struct endpoint *endpoint) {
    atomic_store_explicit(&endpoint->entered, 0, memory_order_release);
}

static inline bool endpoint_is_mine(const struct endpoint *endpoint) {
    return atomic_load_explicit(&endpoint->entered, memory_order_relaxed) == lock_self();
}

/* The same for a thread that forks, and does not use the endpoint. */
#define ENTERED_FOR_FORK 1
static inline void endpoint_enter_for_fork(struct endpoint *endpoint, unsigned max_naps) {
    if (!endpoint_is_mine(endpoint) && endpoint_enter(endpoint, max_naps)) {
        atomic_store_explicit(&endpoint->entered, lock_self() | ENTERED_FOR_FORK, memory_order_relaxed);
    }
}

static inline void endpoint_leave_after_fork(struct endpoint *endpoint) {
    if (atomic_load_explicit(&endpoint->entered, memory_order_relaxed) == (lock_self() | ENTERED_FOR_FORK)) {
        endpoint_leave(endpoint);
    }
}

/* Forgets all blocks and records. The caller is alone in a forked child. */
void endpoint_forget(struct endpoint *endpoint);

/* Adds one to a counter that one thread at a time writes and others read. */
static inline void count_one(_Atomic(uint64_t) *count) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

#endif
