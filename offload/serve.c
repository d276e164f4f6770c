#include "offload/serve.h"

#include "arena/blocks.h"
#include "arena/large.h"
#include "base/assert.h"
#include "base/size.h"
#include "offload/prefill.h"

#define FLUSH_NAPS 20

/* ---- calls ---- */

static void take_for(struct server *server, struct request *request) {
    struct arenas *arenas = server->setup.arenas;
    if (request->size_class != 0) {
        request->count = arena_take_blocks(arenas, request->size_class, request->blocks, request->count);
    } else {
        request->blocks[0] =
            arena_take_large(arenas, request->pages, request->align_pages, request->zeroed, &request->zero);
        request->count = request->blocks[0] != NULL;
    }
}

static void serve_call(struct server *server, struct endpoint *endpoint, uint32_t slot) {
    struct call *call = &server->calls[slot];
    if (!call_begin(call)) {
        return;
    }
    count_one(&server->counts.calls);
    take_for(server, &call->request);
    /* Copied, as another client may have the slot once the call is answered. */
    struct request request = call->request;
    if (!call_answer(call)) {
        server_put(server, request.size_class, call->blocks, request.count);
        call_free(call);
    }
    if (request.align_pages <= 1) {
        prefill_missed(server, endpoint, &request);
    }
}

/* ---- records ---- */

/* Returns the freed bytes. */
static size_t serve_record(struct server *server, struct endpoint *endpoint, uint64_t header,
                           const uint64_t *payload) {
    uint32_t subject = record_subject(header);
    if (record_kind_of(header) == RECORD_CALL) {
        serve_call(server, endpoint, subject);
        return 0;
    }
    size_t count = record_count(header);
    calm_assert(subject < server->setup.layout.classes->count && count > 0, subject, count);
    server_put(server, subject, (void *const *)(const void *)payload, count);
    return subject == 0 ? (size_t)payload[1] : count * server->setup.layout.classes->of[subject].size;
}

/* Serves the records that are there now: what its clients add meanwhile must
 * not keep the server from the other endpoints. */
static bool serve_endpoint(struct server *server, struct endpoint *endpoint) {
    size_t first = ring_filled(&endpoint->ring);
    for (size_t filled = first; filled > 0;) {
        uint64_t payload[MAX_MAGAZINE_BLOCKS];
        uint64_t header = ring_pop(&endpoint->ring, payload);
        filled -= 1 + record_count(header);
        size_t bytes = serve_record(server, endpoint, header, payload);
        uint64_t served = atomic_load_explicit(&endpoint->served_bytes, memory_order_relaxed) + bytes;
        atomic_store_explicit(&endpoint->served_bytes, served, memory_order_relaxed);
        count_one(&server->counts.records);
    }
    return first > 0;
}

static bool serve_mailbox(struct server *server) {
    struct mailbox *mailbox = &server->mailbox;
    if (!mailbox_take(mailbox)) {
        return false;
    }
    if (mailbox->block != NULL) {
        server_put(server, mailbox->size_class, &mailbox->block, 1);
    } else {
        struct request request = {.size_class = mailbox->size_class, .blocks = &mailbox->block, .count = 1};
        take_for(server, &request);
    }
    mailbox_answer(mailbox);
    return true;
}

bool server_serve(struct server *server) {
    calm_assert(lock_is_mine(&server->lock));
    if (server_is_late(server)) {
        atomic_store_explicit(&server->words.is_late, false, memory_order_relaxed);
    }
    bool worked = serve_mailbox(server);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        worked |= serve_endpoint(server, endpoint);
        worked |= prefill_sample(server, endpoint);
    }
    return worked;
}

void server_drain(struct server *server, unsigned max_naps) {
    server_serve(server);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        if (endpoint_enter(endpoint, max_naps)) {
            serve_endpoint(server, endpoint);
            prefill_withdraw(server, endpoint);
            endpoint_leave(endpoint);
        }
    }
}

void server_flush(struct server *server, uint64_t timeout_ns) {
    if (server_enter(server, timeout_ns, false)) {
        server_drain(server, FLUSH_NAPS);
        lock_release(&server->lock);
    }
}

void server_catch_up(struct server *server, uint64_t timeout_ns) {
    if (server_enter(server, timeout_ns, false)) {
        server_serve(server);
        lock_release(&server->lock);
    }
}
