/*
 * Requests of other processes. A process that may write this process's memory
 * (/proc/PID/mem) writes a request to a block of the library's data, and does
 * not stop the program. A thread of the program carries out the request on its
 * next slow path.
 *
 * The requester writes `ticket`, `request` and `argument`. Then it writes the
 * ticket's number to `pending`, too. The number is not 0, and differs from
 * `completed` and `claimed`. The library sets `result` and `error`, then sets
 * `completed` to the number, and then `pending` to 0. A requester that gives up
 * sets `pending` to 0.
 *
 * - A thread notices a request by one relaxed load of a word that seldom
 *   changes.
 * - The thread whose compare-and-swap of `claimed` to the request's number
 *   succeeds carries out the request. Other threads continue with their own
 *   work. The thread itself also continues if it arrives here again meanwhile.
 * - A kernel may write a word byte by byte. A half-written number is not the
 *   ticket's number, so nothing happens before `pending` is complete.
 * - If two requesters write at the same time, the library serves the one that
 *   wrote the ticket last. The other one waits in vain, because `completed`
 *   never becomes its number. A mixture of both requests is harmless: the
 *   mixture is one of the requests below, or the library refuses it.
 * - After fork, the child drops its parent's request by control_cancel.
 *
 * A requester finds the address in the library's table of counters
 * (os/counter_table.h). It writes through the descriptor by which it read this
 * table, since a descriptor never refers to another process later.
 */
#ifndef CALM_OS_CONTROL_H
#define CALM_OS_CONTROL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CONTROL_VERSION 1

enum control_request {
    CONTROL_TRIM = 1, /* returns all free memory but `argument` bytes; result: the bytes returned */
    /* Samples the heap, on average once in `argument` bytes; 0 stops the
     * sampling. The upper 32 bits are the number of seconds after which
     * sampling ends unless it is requested again; 0: never. result: the mean in
     * force, which differs if the program has set a mean itself. */
    CONTROL_PROFILE,
};

/* A new version adds fields at the end, and `bytes` shows that. A change of
 * meaning changes the version. */
struct control {
    char magic[8]; /* "calmctrl", without its NUL */
    uint32_t version;
    uint32_t bytes;
    _Atomic(uint32_t) pending;   /* 0: no request */
    _Atomic(uint32_t) completed; /* the last request that was carried out */
    _Atomic(uint32_t) ticket;
    _Atomic(uint32_t) request; /* enum control_request */
    _Atomic(uint64_t) argument;
    _Atomic(uint64_t) result;
    _Atomic(int32_t) error; /* 0 or an errno; ENOSYS: unknown request */
    _Atomic(uint32_t) claimed;
};

#define CONTROL_INITIAL                                                                \
    {                                                                                  \
        .magic = {'c', 'a', 'l', 'm', 'c', 't', 'r', 'l'}, .version = CONTROL_VERSION, \
        .bytes = sizeof(struct control)                                                \
    }

/* The library's own block. It has a cache line to itself, because slow paths
 * read it. */
extern struct control os_control __attribute__((visibility("hidden")));

struct control_claim {
    uint32_t number;
    uint32_t request;
    uint64_t argument;
};

/* Returns whether there may be a request. Any thread may call it. */
static inline bool control_is_pending(const struct control *control) {
    return __builtin_expect(atomic_load_explicit(&control->pending, memory_order_relaxed) != 0, 0);
}

/* Returns whether the caller is the thread that carries out the request. The
 * caller must then call control_complete. The caller must hold no lock that the
 * request may need. */
bool control_claim(struct control *control, struct control_claim *claim);
void control_complete(struct control *control, const struct control_claim *claim, int error, uint64_t result);

/* Drops the request in a forked child. It writes only if a request is
 * pending. */
void control_cancel(struct control *control);

#endif
