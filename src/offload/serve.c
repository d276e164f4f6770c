#include "offload/server.h"

#include "offload/stock.h"
#include "os/futex.h"

/* Blocks of the overflow that are served before all else is looked at again. */
#define OVERFLOW_AT_ONCE 128

/* Calls. */

/* The call is the server's now; false if it was abandoned, or served before. */
static bool take_call(struct call *call) {
    /* Acquired also where it was abandoned: what its client did is done before the next one has the slot. */
    uint32_t state = atomic_load_explicit(&call->state, memory_order_acquire);
    while ((state & CALL_STATE) == CALL_PENDING) {
        if (atomic_compare_exchange_weak_explicit(&call->state, &state, (state & CALL_SLEEPING) | CALL_TAKEN,
                                                  memory_order_acquire, memory_order_acquire)) {
            return true;
        }
    }
    if ((state & CALL_STATE) == CALL_ABANDONED) {
        atomic_store_explicit(&call->state, CALL_FREE, memory_order_release);
    }
    return false;
}

static void undo(struct server *server, const struct call *call) {
    if (call->kind == CALL_BLOCKS && call->count > 0) {
        server->owner.put(server->owner.context, call->class, call->blocks, call->count);
    } else if (call->kind == CALL_LARGE && call->block != NULL) {
        server->owner.put_large(server->owner.context, call->block);
    }
}

static void answer_call(struct server *server, struct call *call) {
    uint32_t before = atomic_exchange_explicit(&call->state, CALL_DONE, memory_order_acq_rel);
    if ((before & CALL_STATE) == CALL_ABANDONED) {
        undo(server, call);
        atomic_store_explicit(&call->state, CALL_FREE, memory_order_release);
    } else if ((before & CALL_SLEEPING) != 0) {
        futex_wake_all(&call->state);
    }
}

/*
 * Whether a client that waits for a block is better served at once than with all of its pages resident:
 * unless it waits again and again, and then would fault again and again.
 */
static bool is_urgent(const struct endpoint *endpoint, uint32_t class, size_t pages) {
    if (endpoint == NULL) {
        return false;
    }
    const struct large_stock *stock = &endpoint->large[large_place(pages)];
    return class != 0 ? !predictor_falls_behind(&endpoint->predictors[class])
                      : large_pages(stock) != pages || !predictor_falls_behind(&stock->predictor);
}

static void serve_call(struct server *server, struct endpoint *endpoint, uint32_t slot) {
    struct call *call = &server->calls[slot];
    if (!take_call(call)) {
        return;
    }
    server_count(&server->counts.calls);
    void *context = server->owner.context;
    /* Another client may have the slot as soon as the call is answered. */
    enum call_kind kind = call->kind;
    uint32_t class = call->class;
    size_t pages = call->pages;
    bool plain = call->align_pages <= 1;
    unsigned flags;
    switch (kind) {
    case CALL_BLOCKS:
        flags = is_urgent(endpoint, class, 0) ? TAKE_AT_ONCE : 0;
        call->count = server->owner.take(context, class, call->blocks, call->count, flags);
        break;
    case CALL_LARGE:
        flags = call->flags | (is_urgent(endpoint, 0, pages) ? TAKE_AT_ONCE : 0);
        call->block = server->owner.take_large(context, pages, call->align_pages, flags, &call->zero);
        break;
    case CALL_SHORT:
    case CALL_LONG:
        call->work(call->subject);
        break;
    }
    answer_call(server, call);
    if (kind == CALL_BLOCKS && endpoint != NULL) {
        stock_expect(server, endpoint, class);
    } else if (kind == CALL_LARGE && endpoint != NULL && plain) {
        stock_expect_large(server, endpoint, pages);
    }
}

/* Records. */

static void serve_record(struct server *server, struct endpoint *endpoint, uint64_t header,
                         const uint64_t *payload) {
    void *context = server->owner.context;
    uint32_t subject = record_subject(header);
    size_t count = record_count(header);
    switch (record_kind(header)) {
    case RECORD_FREE:
        server->owner.put(context, subject, (void *const *)(const void *)payload, count);
        break;
    case RECORD_FREE_LARGE:
        server->owner.put_large(context, (void *)(uintptr_t)payload[0]);
        break;
    case RECORD_CALL:
        serve_call(server, endpoint, subject);
        break;
    case RECORD_LONG_CALL:
        if (server->depth > 1) {
            server->deferred[subject / 64] |= (uint64_t)1 << (subject % 64);
        } else {
            serve_call(server, endpoint, subject);
        }
        break;
    }
}

static size_t record_bytes(const struct server *server, uint64_t header, const uint64_t *payload) {
    switch (record_kind(header)) {
    case RECORD_FREE:
        return record_count(header) * server->owner.classes->of[record_subject(header)].size;
    case RECORD_FREE_LARGE:
        return (size_t)payload[1];
    default:
        return 0;
    }
}

/* What is there now, so that nobody keeps the server from the others. */
static bool serve_endpoint(struct server *server, struct endpoint *endpoint) {
    size_t filled = ring_filled(&endpoint->ring, false);
    if (filled == 0) {
        return false;
    }
    while (filled > 0) {
        uint64_t header;
        uint64_t payload[MAGAZINE_BLOCKS_MOST];
        ring_peek(&endpoint->ring, 0, &header, 1);
        size_t count = record_count(header);
        ring_peek(&endpoint->ring, 1, payload, count);
        /* Out of the ring before it is served: what serves it may come here again. */
        ring_take(&endpoint->ring, 1 + count);
        filled -= 1 + count;
        uint64_t bytes = record_bytes(server, header, payload);
        serve_record(server, endpoint, header, payload);
        bytes += atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed);
        atomic_store_explicit(&endpoint->served_bytes, bytes, memory_order_relaxed);
        server_count(&server->counts.records);
        size_t now = ring_filled(&endpoint->ring, false);
        filled = filled < now ? filled : now;
    }
    return true;
}

/* What found no room, or no server: there may be millions of them, and others wait. */
static bool serve_overflow(struct server *server) {
    void *blocks[OVERFLOW_AT_ONCE];
    bool worked = false;
    for (;;) {
        size_t count = overflow_pop(&server->overflow, blocks, OVERFLOW_AT_ONCE);
        if (count == 0) {
            return worked;
        }
        for (size_t i = 0; i < count; i++) {
            uint32_t class = server->owner.class_of(server->owner.context, blocks[i]);
            if (class != 0) {
                server->owner.put(server->owner.context, class, &blocks[i], 1);
            } else {
                server->owner.put_large(server->owner.context, blocks[i]);
            }
        }
        worked = true;
        if (count == OVERFLOW_AT_ONCE && server->depth == 1) {
            server_serve(server);
        }
    }
}

static bool serve_sync(struct server *server) {
    struct sync *sync = &server->sync;
    uint32_t request = SYNC_REQUEST;
    if (atomic_load_explicit(&sync->ready, memory_order_relaxed) != SYNC_REQUEST ||
        !atomic_compare_exchange_strong_explicit(&sync->ready, &request, SYNC_TAKEN, memory_order_acquire,
                                                 memory_order_relaxed)) {
        return false;
    }
    void *context = server->owner.context;
    if (sync->block != NULL) {
        server->owner.put(context, sync->class, &sync->block, 1);
    } else if (server->owner.take(context, sync->class, &sync->block, 1, 0) == 0) {
        sync->block = NULL;
    }
    atomic_store_explicit(&sync->ready, SYNC_NONE, memory_order_relaxed);
    atomic_store_explicit(&sync->done, 1, memory_order_release);
    return true;
}

bool server_has_deferred(const struct server *server) {
    uint64_t any = 0;
    for (unsigned word = 0; word < CALL_WORDS; word++) {
        any |= server->deferred[word];
    }
    return any != 0;
}

static void serve_deferred(struct server *server) {
    for (unsigned word = 0; word < CALL_WORDS; word++) {
        while (server->deferred[word] != 0) {
            uint32_t slot = word * 64 + (uint32_t)__builtin_ctzll(server->deferred[word]);
            server->deferred[word] &= server->deferred[word] - 1;
            serve_call(server, NULL, slot);
        }
    }
}

bool server_serve_between(struct server *server) {
    server->depth++;
    bool worked = server_serve(server);
    server->depth--;
    return worked;
}

bool server_serve(struct server *server) {
    bool worked = false;
    server->depth++;
    server_beat(server);
    if (atomic_load_explicit(&server->starved, memory_order_relaxed)) {
        atomic_store_explicit(&server->starved, false, memory_order_relaxed);
    }
    worked |= serve_sync(server);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        struct endpoint *endpoint = server_endpoint(server, number);
        worked |= serve_endpoint(server, endpoint);
        worked |= stock_scan(server, endpoint);
    }
    worked |= serve_overflow(server);
    if (server->depth == 1 && server_has_deferred(server)) {
        serve_deferred(server);
        worked = true;
    }
    server->depth--;
    return worked;
}
