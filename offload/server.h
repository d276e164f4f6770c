/*
 * The server: a thread that prepares blocks for all others, and takes back what
 * they free ("NextGen-Malloc", section 3.1). Its state, and the operations that
 * all files of this folder need. The thread itself: loop.h, lifecycle.h.
 *
 * The heap is the arena's, under its locks: the server is one of the threads
 * that work on it. So a client need never wait for the server, and works on the
 * heap itself when the server is late or does not serve. The server's thread
 * has no thread-local storage, does not use the C library, and blocks all
 * signals.
 */
#ifndef CALM_OFFLOAD_SERVER_H
#define CALM_OFFLOAD_SERVER_H

#include "arena/state.h"
#include "offload/affinity.h"
#include "offload/call.h"
#include "offload/contention.h"
#include "offload/endpoint.h"
#include "offload/mailbox.h"
#include "offload/misuse_queue.h"

/* A fork and a trim wait for the server this many times longer than an
 * allocation. */
#define LONG_TIMEOUT_FACTOR 100
/* A free wakes a napping server only if more freed bytes than this wait for
 * it. */
#define MAX_BACKLOG_BYTES ((size_t)1 << 20)

/* REFUSED: by the kernel. ENDED: the process ends. No thread is started after
 * either. */
enum server_thread { THREAD_NONE, THREAD_STARTED, THREAD_REFUSED, THREAD_ENDED };

/* NAPS: it soon wakes by itself. SLEEPS: for good. */
enum server_state { SERVER_AWAKE, SERVER_NAPS, SERVER_DOZES, SERVER_SLEEPS };

/* Fixed by server_init. */
struct server_setup {
    struct arenas *arenas;
    struct affinity_request cpu;
    uint64_t timeout_ns; /* how long a client waits for an answer */
    struct endpoint_layout layout;
    char *endpoint_memory; /* reserved; committed where an endpoint is open */
    size_t endpoint_bytes;
    unsigned endpoint_count;
    _Atomic(struct endpoint *) *endpoints; /* by number; NULL: not open. Stored under the lock `opening` */
};

/* Atomic words, by which threads talk to each other. */
struct server_words {
    /* Whether clients may use their endpoints and the mailbox. A client reads
     * it after it has entered. */
    _Atomic(bool) serves;
    _Atomic(bool) is_late;                  /* a client timed out, and the server has not served since */
    _Atomic(bool) has_leftovers;            /* this process has no server, and its parent had one */
    _Atomic(int) thread;                    /* enum server_thread */
    _Atomic(uint32_t) operations;           /* on the heap by clients, before the server was started */
    _Atomic(struct endpoint *) last_opened; /* the list of open endpoints */
    _Alignas(64) _Atomic(uint32_t) state;   /* enum server_state */
    _Atomic(uint32_t) wakeup;               /* a futex word: the number of wakeups */
    _Atomic(uint32_t) claims; /* threads other than the server that want its lock: a futex word */
    struct misuse_queue misuse;
};

/* Counters for reports: the first two count what any thread does; others change
 * under the server's lock. */
struct server_counts {
    _Atomic(uint64_t) wakes;
    _Atomic(uint64_t) late; /* times that a client timed out */
    _Atomic(uint64_t) calls;
    _Atomic(uint64_t) records;
    _Atomic(uint64_t) prefilled;      /* magazines and large blocks put into prefill queues */
    _Atomic(uint64_t) prefill_unused; /* those of them that were withdrawn */
    _Atomic(uint64_t) naps;
    _Atomic(uint64_t) pauses; /* times that the server stopped serving for want of a CPU */
};

/* The server's thread alone; survey.view.allowed is set before it starts. */
struct server_own {
    uint64_t poll_until_ns; /* 0: there was work since the clock was read */
    uint64_t nap_ns;        /* length of the next nap */
    uint64_t epoch_start_ns;
    struct contention contention;
    bool idle;      /* the last epoch left nothing to return */
    bool keeps_cpu; /* serves also while the CPUs are contended */
    bool reported;  /* that the requested CPU cannot be had */
    struct affinity_survey survey;
};

/* Under the server's lock. A thread that serves, the server or another one in
 * its place, holds it meanwhile. */
struct server_locked {
    struct endpoint *next_prefilled; /* NULL: the last opened */
    struct thread worker;
    int process;    /* whose thread the worker is: not one that shares its memory */
    unsigned forks; /* nested ones, in signal handlers, that hold the lock and the endpoints */
};

struct server {
    struct server_setup setup;
    struct lock opening; /* to open an endpoint */
    struct server_words words;
    struct server_counts counts;

    _Alignas(64) struct lock lock;
    struct server_locked locked;
    struct server_own own;

    struct mailbox mailbox;
    struct call calls[CALLS];
};

/* Reserves an endpoint for each CPU cache of the arena, whose client caches
 * hold cache_class_bytes of each class. The members of setup up to timeout_ns
 * are set. False if memory is short. */
bool server_init(struct server *server, size_t cache_class_bytes);

/* Puts blocks of a class, or, if it is 0, a large one, into the heap. */
void server_put(struct server *server, uint32_t size_class, void *const *blocks, size_t count);

/* ---- endpoints ---- */

/* The endpoint of a number, modulo their count; made usable, or else the first
 * one if memory is short. Any thread; NULL only where a thread forks. */
struct endpoint *server_open(struct server *server, unsigned number);

/* NULL if it is not open. */
static inline struct endpoint *server_endpoint(const struct server *server, unsigned number) {
    return atomic_load_explicit(&server->setup.endpoints[number], memory_order_acquire);
}

/* The first of all open endpoints, a list, to which others may be added before
 * it. A sequentially consistent load, for the server's check before it
 * sleeps. */
static inline struct endpoint *server_endpoints(const struct server *server) {
    return atomic_load_explicit(&server->words.last_opened, memory_order_seq_cst);
}

/* ---- the server's lock, for other threads ---- */

/* Acquires the lock, for which the server makes way. for_fork: as
 * lock_acquire_for_fork. False if that takes longer than the timeout, or the
 * caller holds the lock already. */
bool server_enter(struct server *server, uint64_t timeout_ns, bool for_fork);

/* ---- wakeups ---- */

/* Wakes the server if it sleeps: after a sequentially consistent store of what
 * the server is to find. Any thread. */
void server_wake(struct server *server);

/* Wakes the server whatever its state says: for a thread that waits for the
 * server, and must not depend on another thread that has set SERVER_AWAKE but
 * was stopped before it woke the server. */
void server_wake_always(struct server *server);

/* ---- clients that wait ---- */

static inline uint64_t server_long_timeout_ns(const struct server *server) {
    return LONG_TIMEOUT_FACTOR * server->setup.timeout_ns;
}

/* Whether a client may send something to the server. */
static inline bool server_serves(const struct server *server) {
    return atomic_load_explicit(&server->words.serves, memory_order_acquire);
}

/* A client has timed out: until the server serves again, no other client
 * waits. */
void server_mark_late(struct server *server);

static inline bool server_is_late(const struct server *server) {
    return atomic_load_explicit(&server->words.is_late, memory_order_relaxed);
}

/* Whether the caller is a signal handler that interrupted its thread while it
 * held a lock or an endpoint, or a thread that forks. */
bool server_is_held(const struct server *server);

#endif
