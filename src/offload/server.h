/*
 * The server: the one thread that works on a heap, on behalf of all others ("NextGen-Malloc", section 3.1).
 *
 * What it does on the heap is told by a struct owner, whose functions run on the server alone: so the heap
 * needs no lock. Clients reach it through endpoints and calls (client.h). While work keeps coming it looks
 * around without a pause; then it naps, ever longer; and sleeps for good once there is nothing to tidy. Where
 * it has no CPU to itself it would only be in its clients' way: then it lends the heap to them, and takes it
 * back when the process leaves a CPU idle. Who is in an endpoint finds the heap lent, or not lent,
 * until it leaves: the server lends it while nobody is in any.
 *
 * It is started once a process has come to the heap so often that it is worth a thread; until then the heap
 * is lent, too.
 *
 * A free does not wake it, unless what was freed and not yet served has passed a bound; a call does.
 *
 * It has no thread-local storage, no C library and no signals.
 */
#ifndef CALM_OFFLOAD_SERVER_H
#define CALM_OFFLOAD_SERVER_H

#include "offload/call.h"
#include "offload/crowd.h"
#include "offload/endpoint.h"
#include "offload/overflow.h"
#include "offload/sync.h"
#include "os/thread.h"

/* Who must have the server itself, for a fork, the end, or long work, is so many times as patient as who
 * wants a block. */
#define PATIENCES 100
/* Freed bytes that wait for the server before a free wakes it. */
#define BACKLOG_BYTES_MOST ((size_t)1 << 20)

enum lending {
    LEND_TENDED,   /* for a while; the server tidies it */
    LEND_UNTENDED, /* there is no server yet */
    LEND_FOR_GOOD, /* nor will there be one any more */
};

struct owner {
    void *context;
    const struct size_classes *classes;
    size_t (*take)(void *context, uint32_t class, void **blocks, size_t count, unsigned flags);
    void (*put)(void *context, uint32_t class, void *const *blocks, size_t count);
    void *(*take_large)(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero);
    void (*put_large)(void *context, void *block);
    uint32_t (*class_of)(void *context, const void *block); /* 0: large; of a block that was freed */
    size_t page_size;
    /* Tidies, if a window has passed. True if there is nothing left to tidy. */
    bool (*tick)(void *context);
    /* The heap is everybody's from now on, by its locks; or the server's. While nobody is at it. */
    void (*lend)(void *context, enum lending lending);
    void (*take_back)(void *context);
};

/* Whose the heap is. */
enum phase {
    PHASE_NONE,    /* nobody's yet, in a new process; in a forked one there may be what its parent had sent */
    PHASE_LENT,    /* everybody's, by its locks: the server has no CPU to itself, or there is none */
    PHASE_RUNNING, /* the server's */
};

enum server_thread { THREAD_NONE, THREAD_STARTED, THREAD_REFUSED /* or gone */ };

enum server_state { SERVER_HOT, SERVER_NAPS, SERVER_SLEEPS };

struct server_counts {
    _Atomic(uint64_t) calls;
    _Atomic(uint64_t) records;
    _Atomic(uint64_t) stocked; /* magazines and large blocks made ready */
    _Atomic(uint64_t) unused;  /* of them, those that went back */
    _Atomic(uint64_t) naps;
    _Atomic(uint64_t) lent; /* times that it had no CPU to itself, and lent the heap */
};

struct server {
    struct owner owner;
    char *endpoints;
    size_t endpoint_bytes;
    unsigned endpoint_count;
    uint32_t start_of[SIZE_CLASSES];
    uint8_t stock_depth[SIZE_CLASSES]; /* magazines that there is room for; a power of two */
    uint8_t stock_most[SIZE_CLASSES];  /* magazines */
    uint32_t spare_start[SIZE_CLASSES];
    uint16_t spare_most[SIZE_CLASSES]; /* blocks */
    uint64_t patience_ns;              /* a client that waited so long serves itself */
    bool keeps;                        /* never lends the heap while it runs: it was given its CPU */
    void (*settle)(void *context); /* on the server, when it starts, and takes the heap back; sets keeps */
    void (*lost)(void *context);   /* it was starved for long; once */

    _Atomic(int) phase;  /* enum phase */
    _Atomic(int) thread; /* enum server_thread */
    struct thread worker;
    _Atomic(uint32_t) operations; /* at the heap before the server was started */
    _Atomic(uint32_t) opened;     /* endpoints in use */
    _Atomic(uint16_t) *open;      /* their numbers, in the order of opening */
    _Atomic(bool) *is_open;       /* by number */
    struct lock open_lock;

    _Alignas(64) _Atomic(uint32_t) state; /* enum server_state */
    _Atomic(uint32_t) bell;               /* a count of rings */
    _Atomic(bool) starved;                /* a client waited in vain, and the server was not seen since */
    _Atomic(uint64_t) starved_ns;         /* since when */
    _Atomic(uint32_t) parking;            /* enum parking */
    _Atomic(uint32_t) stopping;
    _Atomic(bool) was_lost;
    struct lock begin_lock;
    struct lock fork_lock;
    bool forks;                /* under fork_lock: all endpoints are the forking thread's */
    _Atomic(bool) left_behind; /* a fork did not wait for it: in the child its heap is lost */
    _Alignas(64) struct overflow overflow;
    _Atomic(uint64_t) wakes;
    _Atomic(uint64_t) losses; /* times that a client waited in vain */

    /* The server's own, which others look at only if it makes them wait. */
    _Alignas(64) _Atomic(uint64_t) beat; /* grows while it lives */
    struct server_counts counts;
    uint64_t hot_until_ns; /* 0: since the last work nobody looked at the clock */
    uint64_t nap_ns;       /* how long the next nap is */
    uint64_t window_ns;    /* when the window began */
    struct crowd crowd;
    unsigned depth;                /* of server_serve */
    unsigned next_fed;             /* endpoint */
    bool in_all;                   /* it is in all endpoints */
    bool idle;                     /* the last tick left nothing to tidy */
    uint64_t deferred[CALL_WORDS]; /* slots of long calls that came in the middle of long work */

    struct sync sync;
    struct call calls[CALLS];
};

/* Room for so many endpoints, with spares of so many bytes for each class; owner is filled. False if memory
 * is short. */
bool server_init(struct server *server, unsigned endpoint_count, size_t spare_class_bytes);

/* Of the server's own, that others read. */
static inline void server_count(_Atomic(uint64_t) *count) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Shows that it lives. The server's thread alone. */
static inline void server_beat(struct server *server) {
    server_count(&server->beat);
}

/* Makes an endpoint usable. Any thread. False if memory is short; never for number 0. */
bool server_open(struct server *server, unsigned number);

static inline bool server_is_open(const struct server *server, unsigned number) {
    return atomic_load_explicit(&server->is_open[number], memory_order_acquire);
}

/* Whether the heap is everybody's. Who is in an endpoint finds it the same until it leaves, if it is not. */
static inline bool server_is_lent(const struct server *server) {
    return atomic_load_explicit(&server->phase, memory_order_acquire) == PHASE_LENT;
}

/* The endpoint of that number. */
static inline struct endpoint *server_endpoint(const struct server *server, unsigned number) {
    return (struct endpoint *)(void *)(server->endpoints + (size_t)number * server->endpoint_bytes);
}

/* A magazine's words: the blocks, and whether it is filled. */
static inline size_t server_magazine_words(const struct server *server, uint32_t class) {
    return 1 + (size_t)server->owner.classes->of[class].batch;
}

static inline struct magazine *server_magazine(const struct server *server, struct endpoint *endpoint,
                                               uint32_t class, uint32_t index) {
    return (struct magazine *)(void *)(endpoint->words + server->start_of[class] +
                                       (index & (server->stock_depth[class] - 1U)) *
                                           server_magazine_words(server, class));
}

/* From PHASE_NONE on: serves what a parent's clients had sent, and lends the heap. Any thread. */
void server_begin(struct server *server);

/* Starts the thread, once: it takes the heap as soon as it runs. Any thread; without effect while one forks.
 */
void server_start(struct server *server);

/* Says that the server does not answer, once. Any thread. */
void server_say_lost(struct server *server);

/* Whether the caller is a signal handler that interrupted its thread where it holds what others may wait for.
 * In the heap's shared mode it may be without that being known. */
bool server_is_held(const struct server *server);

/* The same, and whether it interrupted a thread that is a client, or at the lent heap. It may seem so where
 * another thread is one. */
bool server_interrupts_client(const struct server *server);

/* Serves what is there and ends; the phase is PHASE_LENT then, for good. False if the server does not answer
 * for so long, or is held: it ends later then. */
bool server_stop(struct server *server, uint64_t patience_ns);

/* Wakes it if it sleeps: after a sequentially consistent store of what it is to find. Any thread. */
void server_wake(struct server *server);

/* The same whether or not it says that it sleeps: for who waits for it, and must not depend on another thread
 * that found it asleep and was stopped before it came to ring. */
void server_ring(struct server *server);

/* One look at everything; true if there was work. The server's thread alone. */
bool server_serve(struct server *server);

/* The same between two pieces of long work, so that clients need not wait for all of it; long calls do. */
bool server_serve_between(struct server *server);

/* Whether a fork left the server to the parent. Any thread. */
static inline bool server_is_left_behind(const struct server *server) {
    return atomic_load_explicit(&server->left_behind, memory_order_relaxed);
}

/* Whether the caller forks, and is in all endpoints: a fork handler that allocates must not wait for itself.
 */
static inline bool server_forks_here(const struct server *server) {
    return lock_is_mine(&server->fork_lock) && server->forks;
}

/* Whether there are calls that were put off. The server's thread alone. */
bool server_has_deferred(const struct server *server);

/* Around fork. Before: the server is parked, and no client is in an endpoint; unless it does not answer, or a
 * signal handler forks that interrupted its thread at the heap or among the clients. */
void server_before_fork(struct server *server, bool interrupts);
void server_after_fork(struct server *server, bool child);

#endif
