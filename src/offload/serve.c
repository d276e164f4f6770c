#include "offload/serve.h"

#include "base/assert.h"
#include "base/size.h"
#include "offload/prefill.h"

/* Blocks of the overflow that are served before other clients are. */
#define OVERFLOW_AT_ONCE 128

/* ---- calls ---- */

/* endpoint: where the call came from; NULL if it was deferred. */
static void serve_call(struct server *server, struct endpoint *endpoint, uint32_t slot) {
    struct call *call = &server->calls[slot];
    if (!call_begin(call)) {
        return;
    }
    count_one(&server->counts.calls);
    /* Copied, as another client may have the slot once the call is answered. */
    struct request request = call->request;
    if (request_runs_work(&request)) {
        request.work(request.subject);
    } else {
        /* A client that waits is better served at once than with all pages populated. But one that waits
         * again and again would then fault again and again. */
        bool at_once = endpoint != NULL && !prefill_falls_behind(endpoint, &request);
        server->hooks.take(server->hooks.context, &request, at_once);
        call->request.count = request.count;
        call->request.zero = request.zero;
    }
    if (!call_answer(call)) {
        server_put(server, request.class, call->blocks, request.count);
        call_free(call);
    }
    if (endpoint != NULL && request.kind == REQUEST_TAKE && request.align_pages <= 1) {
        prefill_missed(server, endpoint, &request);
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
    if (record_kind(header) == REQUEST_PUT) {
        calm_assert(subject < server->layout.classes->count && count > 0, subject, count);
        bool large = subject == 0;
        server_put(server, subject, (void *const *)(const void *)payload, large ? 1 : count);
        return large ? (size_t)payload[1] : count * server->layout.classes->of[subject].size;
    }
    if (record_kind(header) == REQUEST_RUN_LONG && server->serve_depth > 1) {
        bits_set(server->deferred, subject);
    } else {
        serve_call(server, endpoint, subject);
    }
    return 0;
}

/* Serves the records that are there now: what its clients add meanwhile must not keep the server from the
 * other endpoints. */
static bool serve_endpoint(struct server *server, struct endpoint *endpoint) {
    size_t first = ring_filled(&endpoint->ring, false);
    for (size_t filled = first; filled > 0;) {
        /* Removed before it is served, as a nested call may serve the same ring. */
        uint64_t payload[MAX_MAGAZINE_BLOCKS];
        uint64_t header = ring_pop(&endpoint->ring, payload);
        /* A nested call may have served the counted records; this one may then be longer than what was left.
         */
        filled = size_minus(filled, 1 + record_count(header));
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
    if (mailbox->block != NULL) {
        server_put(server, mailbox->class, &mailbox->block, 1);
    } else {
        struct request request = {.class = mailbox->class, .blocks = &mailbox->block, .count = 1};
        server->hooks.take(server->hooks.context, &request, false);
    }
    mailbox_answer(mailbox);
    return true;
}

bool server_serve(struct server *server) {
    server->serve_depth++;
    count_one(&server->heartbeat);
    if (atomic_load_explicit(&server->unresponsive_from_ns, memory_order_relaxed) != 0) {
        atomic_store_explicit(&server->unresponsive_from_ns, 0, memory_order_relaxed);
    }
    bool worked = !server_is_shared(server) && serve_mailbox(server);
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
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

void server_serve_between(struct server *server) {
    server->serve_depth++;
    server_serve(server);
    server->serve_depth--;
}
