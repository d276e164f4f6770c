#include "offload/serve.h"

#include "base/size.h"
#include "offload/prefill.h"

/* Blocks of the overflow that are served before other clients are. */
#define OVERFLOW_AT_ONCE 128

/* ---- calls ---- */

/*
 * Flags for a client that waits: it is better served at once than with all pages populated. But a client that
 * waits again and again would then fault again and again.
 */
static unsigned urgency(const struct endpoint *endpoint, uint32_t class, size_t pages) {
    return endpoint == NULL || prefill_falls_behind(endpoint, class, pages) ? 0 : TAKE_AT_ONCE;
}

/* endpoint: where the call came from; NULL if it was deferred. */
static void serve_call(struct server *server, struct endpoint *endpoint, uint32_t slot) {
    struct call *call = &server->calls[slot];
    if (!call_begin(call)) {
        return;
    }
    count_one(&server->counts.calls);
    const struct server_hooks *hooks = &server->hooks;
    /* Copied, as another client may have the slot once the call is answered. */
    enum call_kind kind = call->kind;
    uint32_t class = call->class;
    size_t pages = call->pages;
    bool plain = call->align_pages <= 1;
    if (kind == CALL_BLOCKS) {
        unsigned flags = urgency(endpoint, class, 0);
        call->count = hooks->take(hooks->context, class, call->blocks, call->count, flags);
    } else if (kind == CALL_LARGE) {
        unsigned flags = call->flags | urgency(endpoint, 0, pages);
        call->block = hooks->take_large(hooks->context, pages, call->align_pages, flags, &call->zero);
    } else {
        call->work(call->subject);
    }
    if (!call_answer(call)) {
        if (kind == CALL_BLOCKS) {
            server_put(server, class, call->blocks, call->count);
        } else if (kind == CALL_LARGE) {
            server_put(server, 0, &call->block, call->block != NULL);
        }
        call_free(call);
    }
    if (endpoint != NULL && (kind == CALL_BLOCKS || (kind == CALL_LARGE && plain))) {
        prefill_missed(server, endpoint, kind == CALL_BLOCKS ? class : 0, pages);
    }
}

bool server_has_deferred(const struct server *server) {
    return bits_next(server->deferred, 0, CALLS) < CALLS;
}

static bool serve_deferred(struct server *server) {
    uint32_t first = bits_next(server->deferred, 0, CALLS);
    for (uint32_t slot = first; slot < CALLS; slot = bits_next(server->deferred, 0, CALLS)) {
        bits_clear(server->deferred, slot);
        serve_call(server, NULL, slot);
    }
    return first < CALLS;
}

/* ---- records ---- */

/* Returns the freed bytes. */
static size_t serve_record(struct server *server, struct endpoint *endpoint, uint64_t header,
                           const uint64_t *payload) {
    uint32_t subject = record_subject(header);
    size_t count = record_count(header);
    switch (record_kind(header)) {
    case RECORD_FREE:
        server_put(server, subject, (void *const *)(const void *)payload, count);
        return count * server->layout.classes->of[subject].size;
    case RECORD_FREE_LARGE:
        server_put(server, 0, (void *const *)(const void *)payload, 1);
        return (size_t)payload[1];
    case RECORD_CALL:
    case RECORD_LONG_CALL:
        if (record_kind(header) == RECORD_LONG_CALL && server->serve_depth > 1) {
            bits_set(server->deferred, subject);
        } else {
            serve_call(server, endpoint, subject);
        }
    }
    return 0;
}

/* Serves the records that are there now: what its clients add meanwhile must not keep the server from the
 * other endpoints. */
static bool serve_endpoint(struct server *server, struct endpoint *endpoint) {
    size_t first = ring_filled(&endpoint->ring, false);
    for (size_t filled = first; filled > 0;) {
        uint64_t header;
        uint64_t payload[MAX_MAGAZINE_BLOCKS];
        ring_peek(&endpoint->ring, 0, &header, 1);
        size_t count = record_count(header);
        ring_peek(&endpoint->ring, 1, payload, count);
        /* Removed before it is served, as a nested call may serve the same ring. */
        ring_take(&endpoint->ring, 1 + count);
        filled -= 1 + count;
        size_t bytes = serve_record(server, endpoint, header, payload);
        uint64_t served = atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed) + bytes;
        atomic_store_explicit(&endpoint->served_bytes, served, memory_order_relaxed);
        count_one(&server->counts.records);
        filled = size_min(filled, ring_filled(&endpoint->ring, false));
    }
    return first > 0;
}

/* There may be millions of blocks, while other clients wait. */
static bool serve_overflow(struct server *server) {
    const struct server_hooks *hooks = &server->hooks;
    void *blocks[OVERFLOW_AT_ONCE];
    size_t all = 0;
    size_t count;
    while ((count = overflow_pop(&server->overflow, blocks, OVERFLOW_AT_ONCE)) > 0) {
        for (size_t i = 0; i < count; i++) {
            server_put(server, hooks->class_of(hooks->context, blocks[i]), &blocks[i], 1);
        }
        all += count;
        if (count == OVERFLOW_AT_ONCE && server->serve_depth == 1) {
            server_serve(server);
        }
    }
    return all > 0;
}

static bool serve_mailbox(struct server *server) {
    struct mailbox *mailbox = &server->mailbox;
    if (!mailbox_take(mailbox)) {
        return false;
    }
    const struct server_hooks *hooks = &server->hooks;
    if (mailbox->block != NULL) {
        server_put(server, mailbox->class, &mailbox->block, 1);
    } else if (hooks->take(hooks->context, mailbox->class, &mailbox->block, 1, 0) == 0) {
        mailbox->block = NULL;
    }
    mailbox_answer(mailbox);
    return true;
}

bool server_serve(struct server *server) {
    server->serve_depth++;
    count_one(&server->heartbeat);
    if (atomic_load_explicit(&server->is_unresponsive, memory_order_relaxed)) {
        atomic_store_explicit(&server->is_unresponsive, false, memory_order_relaxed);
    }
    bool worked = serve_mailbox(server);
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        struct endpoint *endpoint = server_open_endpoint(server, i);
        worked |= serve_endpoint(server, endpoint);
        worked |= prefill_sample(server, endpoint);
    }
    worked |= serve_overflow(server);
    if (server->serve_depth == 1) {
        worked |= serve_deferred(server);
    }
    server->serve_depth--;
    return worked;
}

bool server_serve_between(struct server *server) {
    server->serve_depth++;
    bool worked = server_serve(server);
    server->serve_depth--;
    return worked;
}
