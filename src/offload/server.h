/*
 * The server: the one thread that works on a heap, on behalf of all others ("NextGen-Malloc", section 3.1).
 * Its state, and the operations that all files of this folder need. The thread: loop.h, lifecycle.h.
 *
 * In exclusive mode the hooks run on its thread alone, so the heap needs no lock; clients reach it through
 * endpoints and calls (client.h). In shared mode clients work on the heap under its locks (heap_mode.h).
 * The thread has no thread-local storage, does not use the C library, and blocks all signals.
 */
#ifndef CALM_OFFLOAD_SERVER_H
#define CALM_OFFLOAD_SERVER_H

#include "offload/call.h"
#include "offload/contention.h"
#include "offload/endpoint.h"
#include "offload/mailbox.h"
#include "offload/overflow.h"
#include "os/thread.h"

/* A fork, the process's end and long work wait for the server this many times longer than an allocation. */
#define LONG_TIMEOUT_FACTOR 100
/* A free wakes the server only if more freed bytes than this wait for it; a call always does. */
#define MAX_BACKLOG_BYTES ((size_t)1 << 20)

enum heap_mode {
    HEAP_MODE_UNSET, /* a new process; or a forked one, with what the parent's clients had sent */
    HEAP_MODE_SHARED,
    HEAP_MODE_EXCLUSIVE,
};

/* Why the heap is in shared mode. */
enum sharing {
    SHARING_FOR_NOW,     /* the server has no CPU to itself; it still purges */
    SHARING_UNTIL_START, /* the server has not started */
    SHARING_FOR_GOOD,    /* the server has ended */
};

struct server_hooks {
    void *context;
    const struct size_classes *classes;
    size_t (*take)(void *context, uint32_t class, void **blocks, size_t count, unsigned flags);
    void (*put)(void *context, uint32_t class, void *const *blocks, size_t count);
    void *(*take_large)(void *context, size_t pages, size_t align_pages, unsigned flags, bool *zero);
    void (*put_large)(void *context, void *block);
    uint32_t (*class_of)(void *context, const void *block); /* of a freed block; 0: large */
    size_t page_size;
    /* Purges, once per epoch. True if nothing is left to purge. */
    bool (*tick)(void *context);
    /* The mode changes. No thread is inside the heap, nor has a block of it in an endpoint. */
    void (*switch_to_shared)(void *context, enum sharing sharing);
    void (*switch_to_exclusive)(void *context);
    /* On the server, before each switch to exclusive mode: binds it to a CPU; may set always_exclusive. */
    void (*choose_cpu)(void *context);
    /* The server has been unresponsive for long. Once, on any thread. */
    void (*report_unresponsive)(void *context);
};

enum server_thread { THREAD_NONE, THREAD_STARTED, THREAD_REFUSED /* or ended */ };

enum server_state { SERVER_AWAKE, SERVER_NAPS, SERVER_SLEEPS };

/* Requested by another thread; PARKED and STOPPED are the server's answers. Futex words. */
enum parking { PARKING_NONE, PARKING_REQUESTED, PARKING_PARKED };
enum stopping { STOPPING_NONE, STOPPING_REQUESTED, STOPPING_STOPPED };

/* Written by the server alone. */
struct server_counts {
    _Atomic(uint64_t) calls;
    _Atomic(uint64_t) records;
    _Atomic(uint64_t) prefilled;      /* magazines and large blocks put into prefill queues */
    _Atomic(uint64_t) prefill_unused; /* those of them that were withdrawn */
    _Atomic(uint64_t) naps;
    _Atomic(uint64_t) shared_switches; /* to shared mode, because of CPU contention */
};

struct server {
    struct server_hooks hooks;
    struct endpoint_layout layout;
    char *endpoints;
    size_t endpoint_bytes;
    unsigned endpoint_count;
    uint64_t timeout_ns;   /* how long a client waits before it serves itself */
    bool always_exclusive; /* no shared mode while the server runs: its CPU is reserved for it */

    _Atomic(int) heap_mode; /* enum heap_mode */
    _Atomic(int) thread;    /* enum server_thread */
    struct thread worker;
    _Atomic(uint32_t) operations; /* on the heap, before the server was started */
    _Atomic(uint32_t) opened;     /* endpoints in use */
    _Atomic(uint16_t) *open;      /* their numbers, in the order of opening */
    _Atomic(bool) *is_open;       /* by number */
    struct lock open_lock;        /* to open an endpoint, to enter all, to switch the mode */

    _Alignas(64) _Atomic(uint32_t) state;   /* enum server_state */
    _Atomic(uint32_t) wakeup;               /* a futex word: the number of wakeups */
    _Atomic(bool) is_unresponsive;          /* a client timed out, and the server has not served since */
    _Atomic(uint64_t) unresponsive_from_ns; /* when that began */
    _Atomic(uint32_t) parking;              /* enum parking */
    _Atomic(uint32_t) stopping;             /* enum stopping */
    _Atomic(bool) is_reported;              /* that it was unresponsive for long */
    struct lock begin_lock;
    struct lock fork_lock;
    bool forks;             /* under fork_lock: the forking thread has entered all endpoints */
    _Atomic(bool) orphaned; /* a fork did not wait for the server: the child must not use the heap */
    _Alignas(64) struct overflow overflow;
    _Atomic(uint64_t) wakes;
    _Atomic(uint64_t) unresponsive; /* times that a client timed out */

    /* The server's own. Other threads read only the heartbeat and the counts. */
    _Alignas(64) _Atomic(uint64_t) heartbeat; /* increases while the server makes progress */
    struct server_counts counts;
    uint64_t poll_until_ns; /* 0: there was work since the clock was read */
    uint64_t nap_ns;        /* length of the next nap */
    uint64_t epoch_start_ns;
    struct contention contention;
    unsigned serve_depth;          /* of nested calls of server_serve */
    unsigned next_prefilled;       /* endpoint */
    bool has_entered_all;          /* all endpoints */
    bool idle;                     /* the last epoch left nothing to purge or withdraw */
    uint64_t deferred[CALL_WORDS]; /* slots of long calls that arrived in the middle of long work */

    struct mailbox mailbox;
    struct call calls[CALLS];
};

/* Reserves endpoint_count endpoints, whose client caches hold cache_class_bytes of each class. The hooks are
 * set. False if memory is short. */
bool server_init(struct server *server, unsigned endpoint_count, size_t cache_class_bytes);

/* Frees blocks of a class, or one large block: class is then 0, or the number of a large block's queue. */
static inline void server_put(struct server *server, uint32_t class, void *const *blocks, size_t count) {
    const struct server_hooks *hooks = &server->hooks;
    if (count > 0 && (class == 0 || class >= SIZE_CLASSES)) {
        hooks->put_large(hooks->context, blocks[0]);
    } else if (count > 0) {
        hooks->put(hooks->context, class, blocks, count);
    }
}

/* ---- endpoints ---- */

/* Makes an endpoint usable. Any thread. False if memory is short; never for number 0. */
bool server_open(struct server *server, unsigned number);

static inline bool server_is_open(const struct server *server, unsigned number) {
    return atomic_load_explicit(&server->is_open[number], memory_order_acquire);
}

static inline struct endpoint *server_endpoint(const struct server *server, unsigned number) {
    return (struct endpoint *)(void *)(server->endpoints + (size_t)number * server->endpoint_bytes);
}

/* The number of open endpoints. A sequentially consistent load, for the server's check before it sleeps. */
static inline unsigned server_opened(const struct server *server) {
    return atomic_load_explicit(&server->opened, memory_order_seq_cst);
}

/* The i-th of them, in the order of opening. */
static inline struct endpoint *server_open_endpoint(const struct server *server, unsigned i) {
    return server_endpoint(server, atomic_load_explicit(&server->open[i], memory_order_relaxed));
}

/* ---- modes ---- */

/* If a thread that has entered an endpoint finds the heap in exclusive mode, the heap stays so until the
 * thread leaves. */
static inline bool server_is_shared(const struct server *server) {
    return atomic_load_explicit(&server->heap_mode, memory_order_acquire) == HEAP_MODE_SHARED;
}

/* Whether the caller forks, and has entered all endpoints: a fork handler that allocates must not wait for
 * itself. */
static inline bool server_forks_here(const struct server *server) {
    return lock_is_mine(&server->fork_lock) && server->forks;
}

static inline bool server_is_orphaned(const struct server *server) {
    return atomic_load_explicit(&server->orphaned, memory_order_relaxed);
}

/* ---- wakeups ---- */

/* Wakes the server if it sleeps: after a sequentially consistent store of what the server is to find. Any
 * thread. */
void server_wake(struct server *server);

/* Wakes the server whatever its state says: for a thread that waits for the server, and must not depend on
 * another thread that has set SERVER_AWAKE but was stopped before it woke the server. */
void server_wake_always(struct server *server);

/* ---- an unresponsive server ---- */

static inline uint64_t server_long_timeout_ns(const struct server *server) {
    return LONG_TIMEOUT_FACTOR * server->timeout_ns;
}

/* A client has timed out: until the server serves again, no other client waits. */
void server_mark_unresponsive(struct server *server);

/* Whether that is so. Reports it once it has been so for long. */
bool server_is_unresponsive(struct server *server);

/* Reports it now; once. */
void server_report_unresponsive(struct server *server);

/* ---- signal handlers ---- */

/* Whether the caller is a signal handler that interrupted its thread while it held a lock or an endpoint, for
 * which others may wait. */
bool server_is_held(const struct server *server);

/* The same, or while it waited in a call, or was inside the heap in shared mode. May err for the last. */
bool server_interrupts_client(const struct server *server);

#endif
