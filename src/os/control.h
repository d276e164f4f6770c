/*
 * Requests of other processes. A process that may write this one's memory (/proc/PID/mem) writes a request to
 * a block of the library's data, without stopping the program; a thread of the program carries it out on its
 * next slow path.
 *
 * The requester writes `ticket`, `request` and `argument`, and then `pending`: the ticket's number again,
 * which is not 0, and differs from `completed` and `claimed`. The library sets `result` and `error`, then
 * `completed` to that number, and then `pending` to 0. A requester that gives up sets `pending` to 0.
 *
 * - A thread notices a request by one relaxed load of a word that is otherwise constant.
 * - One thread carries it out: the one whose compare-and-swap of `claimed` to the request's number succeeds.
 * Other threads go on with their own work, and so does this thread if it comes here again meanwhile.
 * - Kernels may write a word byte by byte. A number that is half-written is not the ticket's, so nothing
 * happens before `pending` is whole. If two requesters write at once, the one that wrote the ticket last is
 * served; the other one waits in vain, since its number never is `completed`. A mixture of the two requests
 * is harmless: it is one of the requests below, or refused.
 * - After fork, the child drops its parent's request by control_cancel.
 *
 * A requester writes through the descriptor by which it read the library's table of counters
 * (os/counter_table.h), and which never refers to another process, at the address that this table names.
 */
#ifndef CALM_OS_CONTROL_H
#define CALM_OS_CONTROL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CONTROL_VERSION 1

enum control_request {
    CONTROL_TRIM = 1, /* return all free memory but `argument` bytes; result: the bytes returned */
    /* Sample the heap, one sample for each `argument` bytes on average; 0: stop. The upper 32 bits are the
     * seconds after which sampling ends unless it is requested again; 0: never. result: the mean in force,
     * which differs if the program has set one itself. */
    CONTROL_PROFILE,
};

/* New fields are added at the end, which `bytes` shows; a change of meaning changes the version. */
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

/* The library's own, in a cache line of its own: slow paths read it. */
extern struct control os_control __attribute__((visibility("hidden")));

struct control_claim {
    uint32_t number;
    uint32_t request;
    uint64_t argument;
};

/* Whether there may be a request. Any thread. */
static inline bool control_is_pending(const struct control *control) {
    return __builtin_expect(atomic_load_explicit(&control->pending, memory_order_relaxed) != 0, 0);
}

/* Whether the caller is the thread that carries the request out, and then calls control_complete. Any thread
 * that holds no lock which the request may need. */
bool control_claim(struct control *control, struct control_claim *claim);
void control_complete(struct control *control, const struct control_claim *claim, int error, uint64_t result);

/* In a forked child. Writes nothing if nothing is pending. */
void control_cancel(struct control *control);

#endif
