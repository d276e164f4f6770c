#include "offload/client.h"

#include "os/address_space.h"
#include "os/clock.h"
#include "os/futex.h"

#include <string.h>

/* Looks at an answer before the client sleeps: about ten microseconds, which is less than to sleep and be
 * woken; none where the server has no CPU to itself. */
#define SPINS 300
/* Other endpoints that a client tries when it finds its own held. */
#define TRIES 4

static bool is_starved(const struct server *server) {
    return atomic_load_explicit(&server->starved, memory_order_relaxed);
}

static int phase_of(const struct server *server) {
    return atomic_load_explicit(&server->phase, memory_order_acquire);
}

/* False if memory is short. */
static bool open_endpoint(struct server *server, unsigned number) {
    lock_acquire(&server->open_lock);
    bool open = atomic_load_explicit(&server->is_open[number], memory_order_relaxed);
    if (!open && os_commit(server_endpoint(server, number), server->endpoint_bytes)) {
        uint32_t opened = atomic_load_explicit(&server->opened, memory_order_relaxed);
        atomic_store_explicit(&server->open[opened], (uint16_t)number, memory_order_relaxed);
        atomic_store_explicit(&server->opened, opened + 1, memory_order_release);
        atomic_store_explicit(&server->is_open[number], true, memory_order_release);
        open = true;
    }
    lock_release(&server->open_lock);
    return open;
}

static bool is_open(const struct server *server, unsigned number) {
    return atomic_load_explicit(&server->is_open[number], memory_order_acquire);
}

/* An endpoint that now is the caller's: the one of that number, or one beside it, or that one after a wait.
 * NULL if memory is short. */
static struct endpoint *enter(struct server *server, unsigned number) {
    number %= server->endpoint_count;
    if (!is_open(server, number) && !open_endpoint(server, number)) {
        return NULL;
    }
    for (unsigned i = 0; i < TRIES && i < server->endpoint_count; i++) {
        unsigned other = (number + i) % server->endpoint_count;
        if (is_open(server, other) && lock_try(&server_endpoint(server, other)->lock)) {
            return server_endpoint(server, other);
        }
    }
    struct endpoint *endpoint = server_endpoint(server, number);
    lock_acquire(&endpoint->lock);
    return endpoint;
}

static void leave(struct endpoint *endpoint) {
    lock_release(&endpoint->lock);
}

/* To a count of the endpoint's, under its lock. */
static void add_one(_Atomic(uint64_t) *count) {
    atomic_store_explicit(count, atomic_load_explicit(count, memory_order_relaxed) + 1, memory_order_relaxed);
}

/* Onto the list of what found no room: by the blocks' own first words, for they are free. */
static void overflow(struct server *server, void *const *blocks, size_t count) {
    for (size_t i = 0; i + 1 < count; i++) {
        *(void **)blocks[i] = blocks[i + 1];
    }
    void *head = atomic_load_explicit(&server->overflow, memory_order_relaxed);
    do {
        *(void **)blocks[count - 1] = head;
    } while (!atomic_compare_exchange_weak_explicit(&server->overflow, &head, blocks[0], memory_order_seq_cst,
                                                    memory_order_relaxed));
}

/* Whether so many bytes more are too many to lie there until the server happens to look. */
static bool is_backlog(struct endpoint *endpoint, size_t bytes) {
    endpoint->sent_bytes += bytes;
    return endpoint->sent_bytes - atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed) >
           BACKLOG_BYTES_MOST;
}

static void send_freed(struct server *server, unsigned number, uint64_t header, const uint64_t *payload,
                       size_t count, size_t bytes, void *const *blocks, size_t block_count) {
    struct endpoint *endpoint = enter(server, number);
    bool sent = false;
    bool urgent = true;
    if (endpoint != NULL) {
        urgent = is_backlog(endpoint, bytes);
        sent = ring_push(&endpoint->ring, header, payload, count, urgent);
        if (!sent) {
            endpoint->sent_bytes -= bytes;
            add_one(&endpoint->counts.full);
        }
        leave(endpoint);
    }
    if (!sent) {
        overflow(server, blocks, block_count);
    }
    if (urgent || !sent) {
        server_wake(server);
    }
}

void client_put(struct server *server, unsigned number, uint32_t class, void *const *blocks, size_t count) {
    size_t bytes = count * server->owner.classes->of[class].size;
    send_freed(server, number, record_header(RECORD_FREE, class, count),
               (const uint64_t *)(const void *)blocks, count, bytes, blocks, count);
}

void client_put_large(struct server *server, unsigned number, void *block, size_t bytes) {
    const uint64_t payload[] = {(uintptr_t)block, bytes};
    send_freed(server, number, record_header(RECORD_FREE_LARGE, 0, 2), payload, 2, bytes, &block, 1);
}

/* Calls. */

static struct call *claim(struct server *server, unsigned from) {
    for (unsigned i = 0; i < CALLS; i++) {
        struct call *call = &server->calls[(from + i) % CALLS];
        uint32_t free = CALL_FREE;
        if (atomic_load_explicit(&call->state, memory_order_relaxed) == CALL_FREE &&
            atomic_compare_exchange_strong_explicit(&call->state, &free, CALL_CLAIMED, memory_order_acquire,
                                                    memory_order_relaxed)) {
            return call;
        }
    }
    return NULL;
}

/* The server was waited for in vain. */
void client_give_up(struct server *server) {
    /* It may have served since, and sleep: then it must wake to be seen. */
    atomic_store_explicit(&server->starved, true, memory_order_seq_cst);
    server_wake(server);
    atomic_fetch_add_explicit(&server->losses, 1, memory_order_relaxed);
    if (!atomic_exchange_explicit(&server->was_lost, true, memory_order_relaxed)) {
        server->lost();
    }
}

static bool send_call(struct server *server, unsigned number, const struct call *call) {
    uint64_t header = record_header(RECORD_CALL, (uint32_t)(call - server->calls), 0);
    uint64_t start = 0;
    for (;;) {
        struct endpoint *endpoint = enter(server, number);
        if (endpoint == NULL) {
            return false;
        }
        bool sent = ring_push(&endpoint->ring, header, NULL, 0, true);
        leave(endpoint);
        server_wake(server);
        if (sent) {
            return true;
        }
        uint64_t now = clock_now_ns();
        start = start == 0 ? now : start;
        if (now - start > STARVED_NS) {
            return false;
        }
        cpu_relax();
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
    int spins = atomic_load_explicit(&server->crowded, memory_order_relaxed) ? 0 : SPINS;
    for (; spins > 0; spins--) {
        if (is_done(call)) {
            return true;
        }
        cpu_relax();
    }
    uint64_t start = clock_now_ns();
    uint64_t beat = atomic_load_explicit(&server->beat, memory_order_relaxed);
    for (;;) {
        uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
        if ((state & CALL_STATE) == CALL_DONE) {
            return true;
        }
        if ((state & CALL_SLEEPING) == 0 &&
            !atomic_compare_exchange_strong_explicit(&call->state, &state, state | CALL_SLEEPING,
                                                     memory_order_relaxed, memory_order_relaxed)) {
            continue;
        }
        uint64_t waited = clock_now_ns() - start;
        if (waited >= STARVED_NS) {
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
        futex_wait(&call->state, state | CALL_SLEEPING, STARVED_NS - waited);
    }
}

/* Sends a call whose slot is filled, and waits. */
static enum answer have_served(struct server *server, unsigned number, struct call *call) {
    atomic_store_explicit(&call->state, CALL_PENDING, memory_order_release);
    /* A call that could not be sent may still be served, for an old record that names its slot. */
    bool done = (send_call(server, number, call) || !take_back(call)) && wait_for(server, call);
    if (done) {
        return ANSWER_DONE;
    }
    if (phase_of(server) == PHASE_DIRECT) {
        return ANSWER_DIRECT;
    }
    client_give_up(server);
    return ANSWER_LOST;
}

static void free_slot(struct call *call) {
    atomic_store_explicit(&call->state, CALL_FREE, memory_order_release);
}

/* Whether the server can be asked at all. */
static enum answer look_at(struct server *server) {
    if (phase_of(server) == PHASE_NONE) {
        server_start(server);
    }
    return phase_of(server) == PHASE_DIRECT ? ANSWER_DIRECT : is_starved(server) ? ANSWER_LOST : ANSWER_DONE;
}

bool client_is_served(struct server *server) {
    return look_at(server) != ANSWER_DIRECT;
}

enum answer client_take(struct server *server, unsigned number, uint32_t class, void **blocks, size_t count,
                        size_t *got) {
    *got = 0;
    enum answer answer = look_at(server);
    if (answer == ANSWER_DIRECT) {
        return answer;
    }
    struct endpoint *endpoint = enter(server, number);
    if (endpoint == NULL) {
        return ANSWER_LOST;
    }
    uint32_t taken = atomic_load_explicit(&endpoint->taken[class], memory_order_relaxed);
    uint32_t level = atomic_load_explicit(&endpoint->put[class], memory_order_acquire) - taken;
    if (level > 0) {
        size_t batch = server->owner.classes->of[class].batch;
        memcpy(blocks, server_magazine(server, endpoint, class, taken), batch * sizeof *blocks);
        atomic_store_explicit(&endpoint->taken[class], taken + 1, memory_order_release);
        add_one(&endpoint->counts.hits);
        /* A hint: what of it is lost for want of room, the end of the window finds. The last one is told at
         * once. */
        ring_push(&endpoint->ring, record_header(RECORD_TOOK, class, 0), NULL, 0, level == 1);
        leave(endpoint);
        *got = batch;
        return ANSWER_DONE;
    }
    add_one(&endpoint->counts.misses);
    leave(endpoint);
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

/* One that is ready, if any is. */
static void *take_ready(struct endpoint *endpoint, size_t pages, bool *zero) {
    uint32_t place = large_place(pages);
    struct large_stock *stock = &endpoint->large[place];
    uint32_t taken = atomic_load_explicit(&stock->taken, memory_order_relaxed);
    const struct ready_block *ready = &stock->ready[taken % LARGE_BLOCKS];
    if (atomic_load_explicit(&stock->put, memory_order_acquire) == taken || ready->pages != pages) {
        add_one(&endpoint->counts.misses);
        return NULL;
    }
    void *block = ready->block;
    *zero = ready->zero;
    atomic_store_explicit(&stock->taken, taken + 1, memory_order_release);
    add_one(&endpoint->counts.hits);
    ring_push(&endpoint->ring, record_header(RECORD_TOOK_LARGE, place, 0), NULL, 0, false);
    return block;
}

enum answer client_take_large(struct server *server, unsigned number, size_t pages, size_t align_pages,
                              unsigned flags, void **block, bool *zero) {
    *block = NULL;
    enum answer answer = look_at(server);
    if (answer == ANSWER_DIRECT) {
        return answer;
    }
    if (align_pages <= 1) {
        struct endpoint *endpoint = enter(server, number);
        if (endpoint == NULL) {
            return ANSWER_LOST;
        }
        *block = take_ready(endpoint, pages, zero);
        leave(endpoint);
        if (*block != NULL) {
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
    struct call *call = answer == ANSWER_DONE ? claim(server, number) : NULL;
    if (call == NULL) {
        return answer == ANSWER_DIRECT ? answer : ANSWER_LOST;
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

struct endpoint_counts client_counts(const struct server *server) {
    struct endpoint_counts sum = {0};
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        const struct endpoint_counters *counts = &server_endpoint(server, number)->counts;
        sum.hits += atomic_load_explicit(&counts->hits, memory_order_relaxed);
        sum.misses += atomic_load_explicit(&counts->misses, memory_order_relaxed);
        sum.full += atomic_load_explicit(&counts->full, memory_order_relaxed);
    }
    return sum;
}
