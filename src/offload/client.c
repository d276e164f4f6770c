#include "offload/client.h"

#include "offload/spare.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"

#include <string.h>

/* A client looks for its answer for so long before it sleeps: the server has a CPU to itself, and to be put
 * to sleep and woken takes nearly as long. */
#define SPIN_NS 60000ULL
#define SPINS   16 /* between two looks at the clock */
/* A process that comes to the heap less often is not worth a thread. */
#define OPERATIONS_LEAST 64
/* Between two looks whether a ring that was full has room for a call. */
#define FULL_NS 50000ULL
/* Other endpoints that a client tries when it finds its own held. */
#define TRIES            4
#define CACHE_LINE_BYTES 64

/* Says so if it has been that way for long: that others ran for a moment is no news. */
bool client_is_starved(struct server *server) {
    if (!atomic_load_explicit(&server->starved, memory_order_acquire)) {
        return false;
    }
    uint64_t since = atomic_load_explicit(&server->starved_ns, memory_order_relaxed);
    if (clock_coarse_ns() - since >= PATIENCES * server->patience_ns) {
        server_say_lost(server);
    }
    return true;
}

static int phase_of(const struct server *server) {
    return atomic_load_explicit(&server->phase, memory_order_acquire);
}

/* Whether the server can be asked at all. */
static enum answer look_at(struct server *server) {
    if (phase_of(server) == PHASE_NONE) {
        server_begin(server);
    }
    return phase_of(server) == PHASE_LENT                           ? ANSWER_LENT
           : server_forks_here(server) || client_is_starved(server) ? ANSWER_LOST
                                                                    : ANSWER_DONE;
}

/* An endpoint that now is the caller's: the one of that number, or one beside it, or that one after a wait.
 */
static struct endpoint *enter(struct server *server, unsigned number) {
    number %= server->endpoint_count;
    if (!server_is_open(server, number) && !server_open(server, number)) {
        number = 0; /* which was opened at the start */
    }
    for (unsigned i = 0; i < TRIES && i < server->endpoint_count; i++) {
        unsigned other = (number + i) % server->endpoint_count;
        if (server_is_open(server, other) && endpoint_try(server_endpoint(server, other))) {
            return server_endpoint(server, other);
        }
    }
    struct endpoint *endpoint = server_endpoint(server, number);
    endpoint_enter(endpoint);
    return endpoint;
}

/* To a count of an endpoint that the caller is in, and that others read. */
static void add_one(_Atomic(uint64_t) *count) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Where even the overflow has no room, a server that takes from it makes some. Blocks that wait for one in
 * vain stay in use for good. */
static void overflow(struct server *server, void *const *blocks, size_t count) {
    uint64_t start = 0;
    while (!overflow_push(&server->overflow, blocks, count) && !server_forks_here(server)) {
        uint64_t now = clock_now_ns();
        start = start == 0 ? now : start;
        if (now - start > server->patience_ns) {
            return;
        }
        server_wake(server);
        os_syscall(SYS_sched_yield, 0, 0, 0, 0, 0, 0);
    }
}

/* Whether so many bytes more are too many to lie there until the server happens to look. */
static bool is_backlog(struct endpoint *endpoint, size_t bytes) {
    endpoint->sent_bytes += bytes;
    if (endpoint->sent_bytes - endpoint->served_seen > BACKLOG_BYTES_MOST) {
        endpoint->served_seen = atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed);
    }
    return endpoint->sent_bytes - endpoint->served_seen > BACKLOG_BYTES_MOST;
}

/* Counted before it looks: the server, which says first that it takes the heap back, waits for those that it
 * then finds counted. */
struct endpoint *client_borrow(struct server *server, unsigned number) {
    number %= server->endpoint_count;
    if (!server_is_open(server, number) && !server_open(server, number)) {
        number = 0;
    }
    struct endpoint *endpoint = server_endpoint(server, number);
    atomic_fetch_add_explicit(&endpoint->borrowers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&server->phase, memory_order_seq_cst) != PHASE_LENT) {
        client_return(endpoint);
        return NULL;
    }
    atomic_store_explicit(&endpoint->borrower, lock_self(), memory_order_relaxed);
    if (atomic_load_explicit(&server->thread, memory_order_relaxed) == THREAD_NONE &&
        atomic_fetch_add_explicit(&server->operations, 1, memory_order_relaxed) >= OPERATIONS_LEAST) {
        server_start(server);
    }
    return endpoint;
}

void client_return(struct endpoint *borrowed) {
    atomic_fetch_sub_explicit(&borrowed->borrowers, 1, memory_order_release);
}

/* An endpoint that is the caller's, of a heap that is not lent before it leaves. NULL if it is lent. */
static struct endpoint *enter_running(struct server *server, unsigned number) {
    struct endpoint *endpoint = enter(server, number);
    if (server_is_lent(server)) {
        endpoint_leave(endpoint);
        return NULL;
    }
    return endpoint;
}

/* A record of freed blocks, or the blocks themselves in the overflow. Leaves the endpoint. */
static void send_freed(struct server *server, struct endpoint *endpoint, uint64_t header,
                       const uint64_t *payload, size_t bytes, void *const *blocks, size_t block_count) {
    bool urgent = is_backlog(endpoint, bytes);
    bool sent = ring_push(&endpoint->ring, header, payload, record_count(header), urgent);
    if (!sent) {
        endpoint->sent_bytes -= bytes;
    }
    endpoint_leave(endpoint);
    if (!sent) {
        overflow(server, blocks, block_count);
    }
    if (urgent || !sent) {
        server_wake(server);
    }
}

bool client_put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count) {
    if (server_forks_here(server) && !server_is_lent(server)) {
        overflow(server, blocks, count);
        return true;
    }
    struct endpoint *endpoint = look_at(server) == ANSWER_LENT ? NULL : enter_running(server, number);
    if (endpoint == NULL) {
        return false;
    }
    if (spare_push(server, endpoint, class, blocks, count)) {
        endpoint_leave(endpoint);
        return true;
    }
    send_freed(server, endpoint, record_header(RECORD_FREE, class, count),
               (const uint64_t *)(const void *)blocks, count * server->owner.classes->of[class].size, blocks,
               count);
    return true;
}

bool client_put_large(struct server *server, unsigned number, void *block, size_t bytes) {
    if (server_forks_here(server) && !server_is_lent(server)) {
        overflow(server, &block, 1);
        return true;
    }
    struct endpoint *endpoint = look_at(server) == ANSWER_LENT ? NULL : enter_running(server, number);
    if (endpoint == NULL) {
        return false;
    }
    const uint64_t payload[] = {(uintptr_t)block, bytes};
    send_freed(server, endpoint, record_header(RECORD_FREE_LARGE, 0, 2), payload, bytes, &block, 1);
    return true;
}

/* Calls. */

/* The number of a slot that now is the caller's; CALLS if there is none. */
static unsigned try_to_claim(struct server *server, unsigned from) {
    for (unsigned i = 0; i < CALLS; i++) {
        unsigned slot = (from + i) % CALLS;
        struct call *call = &server->calls[slot];
        uint32_t free = CALL_FREE;
        if (atomic_load_explicit(&call->state, memory_order_relaxed) == CALL_FREE &&
            atomic_compare_exchange_strong_explicit(&call->state, &free, CALL_CLAIMED, memory_order_acquire,
                                                    memory_order_relaxed)) {
            atomic_store_explicit(&call->claimer, lock_self(), memory_order_relaxed);
            return slot;
        }
    }
    return CALLS;
}

/* After a while if more threads wait than there are slots; NULL if that lasts. */
static struct call *claim(struct server *server, unsigned from) {
    unsigned slot = try_to_claim(server, from);
    uint64_t start = slot == CALLS ? clock_now_ns() : 0;
    while (slot == CALLS && clock_now_ns() - start <= server->patience_ns) {
        _Atomic(uint32_t) *state = &server->calls[from % CALLS].state;
        futex_wait(state, atomic_load_explicit(state, memory_order_relaxed), FULL_NS);
        slot = try_to_claim(server, from);
    }
    return slot == CALLS ? NULL : &server->calls[slot];
}

/* The server was waited for in vain. */
void client_give_up(struct server *server) {
    if (!atomic_load_explicit(&server->starved, memory_order_relaxed)) {
        atomic_store_explicit(&server->starved_ns, clock_coarse_ns(), memory_order_relaxed);
    }
    /* With a ring: else it might go to sleep and leave all of them to themselves for ever. */
    atomic_store_explicit(&server->starved, true, memory_order_seq_cst);
    server_wake(server);
    atomic_fetch_add_explicit(&server->losses, 1, memory_order_relaxed);
}

static uint64_t patience_ns(const struct server *server, const struct call *call) {
    return call->kind == CALL_LONG ? PATIENCES * server->patience_ns : server->patience_ns;
}

/* ANSWER_LOST if the ring had no room for so long. */
static enum answer send_call(struct server *server, unsigned number, struct call *call) {
    enum record record = call->kind == CALL_LONG ? RECORD_LONG_CALL : RECORD_CALL;
    uint64_t header = record_header(record, (uint32_t)(call - server->calls), 0);
    uint64_t start = 0;
    for (;;) {
        struct endpoint *endpoint = enter_running(server, number);
        if (endpoint == NULL) {
            return ANSWER_LENT;
        }
        bool sent = ring_push(&endpoint->ring, header, NULL, 0, true);
        endpoint_leave(endpoint);
        server_wake(server);
        if (sent) {
            return ANSWER_DONE;
        }
        uint64_t now = clock_now_ns();
        start = start == 0 ? now : start;
        if (now - start > patience_ns(server, call)) {
            return ANSWER_LOST;
        }
        futex_wait(&call->state, CALL_PENDING, FULL_NS);
    }
}

static bool is_own_work(const struct call *call) {
    return call->kind == CALL_SHORT || call->kind == CALL_LONG;
}

/* A call that the server has not begun, or, unless it runs the caller's own work, not ended, is left to it.
 */
static bool abandon(struct call *call) {
    uint32_t state = atomic_load_explicit(&call->state, memory_order_relaxed);
    while ((state & CALL_STATE) == CALL_PENDING ||
           ((state & CALL_STATE) == CALL_TAKEN && !is_own_work(call))) {
        if (atomic_compare_exchange_weak_explicit(&call->state, &state, CALL_ABANDONED, memory_order_acq_rel,
                                                  memory_order_relaxed)) {
            return true;
        }
    }
    return false;
}

/* A call that was not sent is nobody's but the caller's, unless the server has begun it. */
static bool take_back(struct call *call) {
    uint32_t pending = CALL_PENDING;
    return atomic_compare_exchange_strong_explicit(&call->state, &pending, CALL_FREE, memory_order_acq_rel,
                                                   memory_order_relaxed);
}

static bool is_done(const struct call *call) {
    return (atomic_load_explicit(&call->state, memory_order_acquire) & CALL_STATE) == CALL_DONE;
}

/* Until the call is done. False if it was abandoned. */
static bool wait_for(struct server *server, struct call *call) {
    uint64_t start = clock_now_ns();
    do {
        for (int spins = 0; spins < SPINS; spins++) {
            if (is_done(call)) {
                return true;
            }
            cpu_relax();
        }
    } while (clock_now_ns() - start < SPIN_NS);
    server_ring(server);
    uint64_t beat = atomic_load_explicit(&server->beat, memory_order_relaxed);
    for (;;) {
        uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
        if ((state & CALL_STATE) == CALL_DONE) {
            return true;
        }
        if ((state & CALL_STATE) == CALL_FREE) {
            return false; /* the waiting thread forked, in a signal handler, and this is the child */
        }
        if ((state & CALL_SLEEPING) == 0 &&
            !atomic_compare_exchange_strong_explicit(&call->state, &state, state | CALL_SLEEPING,
                                                     memory_order_relaxed, memory_order_relaxed)) {
            continue;
        }
        uint64_t waited = clock_now_ns() - start;
        if (waited >= patience_ns(server, call)) {
            uint64_t now = atomic_load_explicit(&server->beat, memory_order_relaxed);
            if (is_own_work(call) && now != beat) {
                beat = now;
                start += waited;
                continue;
            }
            if (abandon(call)) {
                return false;
            }
            waited = 0; /* of a call that cannot be left */
            start = clock_now_ns();
        }
        futex_wait(&call->state, state | CALL_SLEEPING, patience_ns(server, call) - waited);
    }
}

/* Sends a call whose slot is filled, and waits. */
static enum answer have_served(struct server *server, unsigned number, struct call *call) {
    atomic_store_explicit(&call->state, CALL_PENDING, memory_order_release);
    /* A call that could not be sent may still be served, for an old record that names its slot. */
    enum answer sent = send_call(server, number, call);
    if ((sent == ANSWER_DONE || !take_back(call)) && wait_for(server, call)) {
        return ANSWER_DONE;
    }
    /* Which may have been taken back since: then it is asked for again. */
    if (sent == ANSWER_LENT || phase_of(server) == PHASE_LENT) {
        return ANSWER_LENT;
    }
    client_give_up(server);
    return ANSWER_LOST;
}

static void free_slot(struct call *call) {
    atomic_store_explicit(&call->state, CALL_FREE, memory_order_release);
}

/* What comes next lies in the server's cache, and comes nearer while this is used. */
static void prefetch(const void *next, size_t words) {
    const char *line = next;
    for (size_t bytes = 0; bytes < words * sizeof(uint64_t); bytes += CACHE_LINE_BYTES) {
        __builtin_prefetch(line + bytes);
    }
}

static bool is_filled(const _Atomic(uint64_t) *filled, uint32_t index) {
    return atomic_load_explicit(filled, memory_order_acquire) == (uint64_t)index + 1;
}

/* Who takes the last that was ready wakes it, so that there is more before it is missed, which would cost a
 * wait. What was taken is found later if it is not seen at once. */
static bool is_asleep(const struct server *server) {
    return atomic_load_explicit(&server->state, memory_order_relaxed) == SERVER_SLEEPS;
}

enum answer client_take(struct server *server, unsigned number, uint32_t class, void **blocks, size_t count,
                        size_t *got) {
    *got = 0;
    enum answer answer = look_at(server);
    if (answer == ANSWER_LENT || server_forks_here(server)) {
        return answer;
    }
    struct endpoint *endpoint = enter_running(server, number);
    if (endpoint == NULL) {
        return ANSWER_LENT;
    }
    *got = spare_pop(server, endpoint, class, blocks, count);
    if (*got > 0) {
        endpoint_leave(endpoint);
        return ANSWER_DONE;
    }
    uint32_t taken = atomic_load_explicit(&endpoint->taken[class], memory_order_relaxed);
    size_t batch = server->owner.classes->of[class].batch;
    const struct magazine *magazine = server_magazine(server, endpoint, class, taken);
    while (is_filled(&magazine->filled, taken) && (*got == 0 || *got + batch <= count)) {
        memcpy(blocks + *got, magazine->blocks, batch * sizeof *blocks);
        *got += batch;
        taken++;
        magazine = server_magazine(server, endpoint, class, taken);
    }
    if (*got > 0) {
        atomic_store_explicit(&endpoint->taken[class], taken, memory_order_release);
        add_one(&endpoint->counts.hits);
        prefetch(magazine, server_magazine_words(server, class));
        bool wakes = is_asleep(server) && !is_filled(&magazine->filled, taken);
        endpoint_leave(endpoint);
        if (wakes) {
            server_wake(server);
        }
        return ANSWER_DONE;
    }
    add_one(&endpoint->counts.misses);
    endpoint_leave(endpoint);
    struct call *call = answer == ANSWER_DONE ? claim(server, number) : NULL;
    if (call == NULL) {
        return ANSWER_LOST;
    }
    call->kind = CALL_BLOCKS;
    call->class = class;
    call->count = count;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        memcpy(blocks, call->blocks, call->count * sizeof *blocks);
        *got = call->count;
        free_slot(call);
    }
    return answer;
}

/* One that is ready, if any is. *last: it was the last, and the server sleeps. */
static void *take_ready(const struct server *server, struct endpoint *endpoint, size_t pages, bool *zero,
                        bool *last) {
    struct large_stock *stock = &endpoint->large[large_place(pages)];
    uint32_t taken = atomic_load_explicit(&stock->taken, memory_order_relaxed);
    const struct ready_block *ready = &stock->ready[taken % LARGE_BLOCKS];
    if (!is_filled(&ready->filled, taken) || ready->pages != pages) {
        add_one(&endpoint->counts.misses);
        return NULL;
    }
    void *block = ready->block;
    *zero = ready->zero;
    atomic_store_explicit(&stock->taken, taken + 1, memory_order_release);
    add_one(&endpoint->counts.hits);
    const struct ready_block *next = &stock->ready[(taken + 1) % LARGE_BLOCKS];
    __builtin_prefetch(next);
    *last = is_asleep(server) && !is_filled(&next->filled, taken + 1);
    return block;
}

enum answer client_take_large(struct server *server, unsigned number, size_t pages, size_t align_pages,
                              unsigned flags, void **block, bool *zero) {
    *block = NULL;
    enum answer answer = look_at(server);
    if (answer == ANSWER_LENT || server_forks_here(server)) {
        return answer;
    }
    if (align_pages <= 1) {
        struct endpoint *endpoint = enter_running(server, number);
        if (endpoint == NULL) {
            return ANSWER_LENT;
        }
        bool last = false;
        *block = take_ready(server, endpoint, pages, zero, &last);
        endpoint_leave(endpoint);
        if (*block != NULL) {
            if (last) {
                server_wake(server);
            }
            return ANSWER_DONE;
        }
    }
    struct call *call = answer == ANSWER_DONE ? claim(server, number) : NULL;
    if (call == NULL) {
        return ANSWER_LOST;
    }
    call->kind = CALL_LARGE;
    call->pages = pages;
    call->align_pages = align_pages;
    call->flags = flags;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        *block = call->block;
        *zero = call->zero;
        free_slot(call);
    }
    return answer;
}

enum answer client_run(struct server *server, unsigned number, enum call_kind kind,
                       void (*work)(void *subject), void *subject) {
    enum answer answer = look_at(server);
    bool asks = answer == ANSWER_DONE || (answer == ANSWER_LOST && kind == CALL_LONG &&
                                          !server_is_left_behind(server) && !server_forks_here(server));
    struct call *call = asks ? claim(server, number) : NULL;
    if (call == NULL) {
        return answer == ANSWER_LENT ? answer : ANSWER_LOST;
    }
    call->kind = kind;
    call->work = work;
    call->subject = subject;
    answer = have_served(server, number, call);
    if (answer == ANSWER_DONE) {
        free_slot(call);
    }
    return answer;
}

struct endpoint_sums client_counts(const struct server *server) {
    struct endpoint_sums sum = {0};
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        const struct endpoint_counts *counts = &server_endpoint(server, number)->counts;
        sum.hits += atomic_load_explicit(&counts->hits, memory_order_relaxed);
        sum.misses += atomic_load_explicit(&counts->misses, memory_order_relaxed);
    }
    return sum;
}
