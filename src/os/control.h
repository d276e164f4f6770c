/*
 * Requests of another process. A process that may write this one's memory (/proc/PID/mem) asks the library to
 * do something by writing to a block of the library's data, without stopping the program; a thread of the
 * program carries it out on its next slow path.
 *
 * The asker writes `ticket`, `request` and `argument`, and last `asked`, the ticket's number once more, which
 * is not 0 and differs from `done` and `claimed`. The library sets `result` and `error`, then `done` to that
 * number, then `asked` to 0. An asker that gives up sets `asked` to 0. So:
 *
 * - A thread notices a request by one relaxed load of a word that is otherwise constant.
 * - One thread carries it out: whose compare-and-swap of `claimed` from another number to this one succeeds.
 *   The others go on with their own work, and so does a thread that comes here again while it carries one
 * out.
 * - Kernels may write a word byte by byte. A number that was read half-written is not the ticket's, so that
 *   nothing happens before `asked` is whole. Of two askers at once, the one that wrote the ticket last is
 *   served, and the other one waits in vain: its number never is `done`. Whatever is read is one of the
 *   requests below or refused, so that a mixture of two does no harm.
 * - After fork, the child drops its parent's request by control_clear.
 *
 * An asker writes through the descriptor that it has read the library's table with, which never refers to
 * another process, and at the address that the table names (os/figures.h).
 */
#ifndef CALM_OS_CONTROL_H
#define CALM_OS_CONTROL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define CONTROL_VERSION 1

enum control_request {
    CONTROL_TRIM = 1, /* give back all free memory but `argument` bytes; result: bytes given back */
    CONTROL_PROFILE,  /* sample the heap each `argument` bytes on average, 0: no more; the upper 32 bits are
                         the seconds after which it ends by itself if nothing is asked until then, 0: never.
                         result: the mean that is in force, which differs where the program has set one */
};

/* New fields go to the end, and with them `bytes`; a change of meaning changes the version. */
struct control {
    char magic[8]; /* "calmctrl", without its NUL */
    uint32_t version;
    uint32_t bytes;
    _Atomic(uint32_t) asked; /* 0: nothing */
    _Atomic(uint32_t) done;  /* the last one that was carried out */
    _Atomic(uint32_t) ticket;
    _Atomic(uint32_t) request; /* enum control_request */
    _Atomic(uint64_t) argument;
    _Atomic(uint64_t) result;
    _Atomic(int32_t) error; /* 0 or an errno; ENOSYS: no such request */
    _Atomic(uint32_t) claimed;
};

#define CONTROL_INITIAL                                                                \
    {                                                                                  \
        .magic = {'c', 'a', 'l', 'm', 'c', 't', 'r', 'l'}, .version = CONTROL_VERSION, \
        .bytes = sizeof(struct control)                                                \
    }

/* The library's own. In a line of its own: other data on it would make the slow paths wait for its writers.
 */
extern struct control os_control __attribute__((visibility("hidden")));

struct control_claim {
    uint32_t number;
    uint32_t request;
    uint64_t argument;
};

/* Whether there may be something to carry out. Any thread. */
static inline bool control_is_asked(const struct control *control) {
    return __builtin_expect(atomic_load_explicit(&control->asked, memory_order_relaxed) != 0, 0);
}

/* True if the caller is to carry it out, and then to call control_finish. Any thread, which holds no lock
 * that the request may need. */
bool control_take(struct control *control, struct control_claim *claim);
void control_finish(struct control *control, const struct control_claim *claim, int error, uint64_t result);

/* In a forked child. Writes nothing where nothing was asked. */
void control_clear(struct control *control);

#endif
