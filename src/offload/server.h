/*
 * The server: the one thread that works on a heap, on behalf of all others ("NextGen-Malloc", section 3.1).
 *
 * What it does on the heap is told by a struct owner, whose functions run on the server alone: so the heap
 * needs no lock. Clients reach it through endpoints and calls (client.h). While work keeps coming it looks
 * around without a pause; then it naps, ever longer; and sleeps for good once there is nothing to tidy. Where
 * it has no CPU to itself it does not spin at all: it sleeps, and makes more ready each time that it runs.
 *
 * A free does not wake it, unless what was freed and not yet served has passed a bound; a call does.
 *
 * It has no thread-local storage, no C library and no signals.
 */
#ifndef CALM_OFFLOAD_SERVER_H
#define CALM_OFFLOAD_SERVER_H

#include "offload/call.h"
#include "offload/endpoint.h"
#include "offload/sync.h"

/* A client that waited so long serves itself. */
#define STARVED_NS 10000000ULL
/* After so long of that the server is lost, and not just without a CPU for a moment. */
#define LOST_NS 1000000000ULL
/* Freed bytes that wait for the server before a free wakes it. */
#define BACKLOG_BYTES_MOST ((size_t)1 << 20)

struct owner {
    void *context;
    const struct size_classes *classes;
    size_t (*take)(void *context, uint32_t class, void **blocks, size_t count);
    void (*put)(void *context, uint32_t class, void *const *blocks, size_t count);
    void *(*take_large)(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero);
    void (*put_large)(void *context, void *block);
    uint32_t (*class_of)(void *context, const void *block); /* 0: large; of a block that was freed */
    size_t page_size;
    /* Tidies, if a window has passed. True if there is nothing left to tidy. */
    bool (*tick)(void *context);
    /* From now on there is no server: the heap is everybody's, by its lock. */
    void (*release)(void *context);
};

enum phase {
    PHASE_NONE,    /* not started yet, or gone with the parent */
    PHASE_RUNNING, /* the heap is the server's */
    PHASE_DIRECT,  /* there is none: the heap is everybody's, by its lock */
};

enum server_state { SERVER_HOT, SERVER_NAPS, SERVER_SLEEPS };

struct server_counts {
    uint64_t calls;
    uint64_t records;
    uint64_t stocked; /* magazines and large blocks made ready */
    uint64_t unused;  /* of them, those that went back */
    uint64_t naps;
    uint64_t crowded; /* periods in which it had no CPU to itself */
};

struct server {
    struct owner owner;
    char *endpoints;
    size_t endpoint_bytes;
    unsigned endpoint_count;
    uint32_t start_of[SIZE_CLASSES];
    uint8_t stock_most[SIZE_CLASSES];       /* magazines */
    int cpu_request;                        /* see place.h */
    void (*started)(struct server *server); /* on the server, first of all: names and places it */
    void (*lost)(void);                     /* it was starved for long; once */

    _Atomic(int) phase;       /* enum phase */
    _Atomic(uint32_t) opened; /* endpoints in use */
    _Atomic(uint16_t) *open;  /* their numbers, in the order of opening */
    _Atomic(bool) *is_open;   /* by number */
    struct lock open_lock;

    _Alignas(64) _Atomic(uint32_t) state; /* enum server_state */
    _Atomic(uint32_t) bell;               /* a count of rings */
    _Alignas(64) _Atomic(uint64_t) beat;  /* grows while it lives */
    _Atomic(bool) crowded;                /* for clients: no use to spin for its answer */
    _Atomic(bool) starved;                /* a client waited in vain, and the server was not seen since */
    _Atomic(uint64_t) starved_ns;         /* since when */
    _Atomic(uint32_t) parking;            /* enum parking */
    _Atomic(uint32_t) stopping;
    _Atomic(bool) was_lost;
    struct lock fork_lock;
    bool left_behind;                      /* a fork did not wait for it: in the child its heap is lost */
    _Alignas(64) _Atomic(void *) overflow; /* freed blocks, each linked to the next through its first word */
    _Atomic(uint64_t) wakes;
    _Atomic(uint64_t) losses; /* times that a client waited in vain */

    /* The server's own. */
    _Alignas(64) struct server_counts counts;
    uint64_t hot_until_ns; /* 0: since the last work nobody looked at the clock */
    uint64_t nap_ns;       /* how long the next nap is */
    uint64_t window_ns;    /* when the window began */
    uint64_t looked_ns;    /* when it last looked whether it is crowded, by the clock and by what it ran */
    uint64_t looked_ran_ns;
    uint64_t crowded_until_ns; /* it has no CPU to itself, as far as it knows, until then */
    uint64_t crowded_ns;       /* how long the last such period was */
    unsigned depth;            /* of server_serve */
    unsigned next_fed;         /* endpoint */
    bool idle;                 /* the last tick left nothing to tidy */
    uint8_t deferred[CALLS];
    unsigned deferred_count;

    struct sync sync;
    struct call calls[CALLS];
};

/* Room for so many endpoints; owner is filled. False if memory is short. */
bool server_init(struct server *server, unsigned endpoint_count);

/* The endpoint of that number. */
static inline struct endpoint *server_endpoint(const struct server *server, unsigned number) {
    return (struct endpoint *)(void *)(server->endpoints + (size_t)number * server->endpoint_bytes);
}

static inline void **server_magazine(const struct server *server, struct endpoint *endpoint, uint32_t class,
                                     uint32_t index) {
    return endpoint->slots + server->start_of[class] +
           (size_t)(index % STOCK_MAGAZINES) * server->owner.classes->of[class].batch;
}

/* Whether it was starved for so long that nothing is to be expected of it. Any thread. */
bool server_is_lost(const struct server *server);

/* Says that, if nobody did. Any thread. */
void server_say_lost(struct server *server);

/* Starts it if it does not run. Any thread. Afterwards the phase is not PHASE_NONE. */
void server_start(struct server *server);

/* Serves what is there and ends; the phase is PHASE_DIRECT then. For the process's end. False if the server
 * does not answer. */
bool server_stop(struct server *server);

/* Wakes it if it sleeps: after a sequentially consistent store of what it is to find. Any thread. */
void server_wake(struct server *server);

/* One look at everything; true if there was work. What the owner's functions call between the pieces of long
 * work, so that clients need not wait for all of it. The server's thread alone. */
bool server_serve(struct server *server);

/* Blocks that lie ready, a large one counting for its pages, and their bytes, about. Any thread. */
size_t server_stock(const struct server *server, size_t *bytes);

/* The most that could lie ready in the endpoints that are in use, blocks and bytes. Any thread. */
size_t server_stock_most(const struct server *server, size_t *bytes);

/* Takes back all stock. The server's thread alone. */
void server_withdraw_all(struct server *server);

/* Around fork. Before: the server is parked, and no client is in an endpoint; unless it does not answer. */
void server_before_fork(struct server *server);
void server_after_fork(struct server *server, bool child);

#endif
