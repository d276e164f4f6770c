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

#include "governor/governor.h"
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

struct server_hooks {
    void *context;
    /* Does a REQUEST_TAKE. at_once: a client waits, so pages need not be populated first. */
    void (*take)(void *context, struct request *request, bool at_once);
    /* Blocks of a class, or, if it is 0, a large one. */
    void (*put)(void *context, uint32_t class, void *const *blocks, size_t count);
    uint32_t (*class_of)(void *context, const void *block); /* of a freed block; 0: large */
    /* Purges, once per epoch. True if nothing is left to purge. */
    bool (*tick)(void *context);
    /* The mode changes. No thread is inside the heap, nor has a block of it in an endpoint. */
    void (*switch_to_shared)(void *context, enum governor_mode mode);
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
    char *endpoint_memory; /* reserved; committed where an endpoint is open */
    size_t endpoint_bytes;
    unsigned endpoint_count;
    _Atomic(struct endpoint *) *endpoints; /* by number; NULL: not open */
    uint64_t timeout_ns;                   /* how long a client waits before it serves itself */
    bool always_exclusive; /* no shared mode while the server runs: its CPU is reserved for it */

    _Atomic(int) heap_mode; /* enum heap_mode */
    _Atomic(int) thread;    /* enum server_thread */
    struct thread worker;
    int process;                            /* whose thread the server is: not one that shares its memory */
    _Atomic(uint32_t) operations;           /* on the heap, before the server was started */
    _Atomic(struct endpoint *) last_opened; /* the list of open endpoints */
    struct lock open_lock;                  /* to open an endpoint, to enter all, to switch the mode */

    _Alignas(64) _Atomic(uint32_t) state;   /* enum server_state */
    _Atomic(uint32_t) wakeup;               /* a futex word: the number of wakeups */
    _Atomic(uint64_t) unresponsive_from_ns; /* 0; or when a client timed out: not served since */
    _Atomic(uint32_t) parking;              /* enum parking */
    _Atomic(uint32_t) stopping;             /* enum stopping */
    _Atomic(bool) is_reported;              /* that it was unresponsive for long */
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
    unsigned serve_depth;            /* of nested calls of server_serve */
    struct endpoint *next_prefilled; /* NULL: the last opened */
    bool idle;                       /* the last epoch left nothing to purge or withdraw */
    uint64_t deferred[CALL_WORDS];   /* slots of long calls that arrived in the middle of long work */

    struct mailbox mailbox;
    struct call calls[CALLS];
};

/* Reserves endpoint_count endpoints, whose client caches hold cache_class_bytes of each class. The hooks and
 * the layout's size classes are set. False if memory is short. */
bool server_init(struct server *server, unsigned endpoint_count, size_t cache_class_bytes);

/* Frees blocks of a class, or, if it is 0, a large one. */
static inline void server_put(struct server *server, uint32_t class, void *const *blocks, size_t count) {
    if (count > 0) {
        server->hooks.put(server->hooks.context, class, blocks, count);
    }
}

/* ---- endpoints ---- */

/* The endpoint of a number, modulo their count; made usable, or else the first one if memory is short. Any
 * thread. */
struct endpoint *server_open(struct server *server, unsigned number);

/* NULL if it is not open. */
static inline struct endpoint *server_endpoint(const struct server *server, unsigned number) {
    return atomic_load_explicit(&server->endpoints[number], memory_order_acquire);
}

/* The first of all open endpoints, a list, to which others may be added before it. A sequentially consistent
 * load, for the server's check before it sleeps. */
static inline struct endpoint *server_endpoints(const struct server *server) {
    return atomic_load_explicit(&server->last_opened, memory_order_seq_cst);
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
