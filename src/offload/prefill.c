#include "offload/prefill.h"

#include <string.h>

/* A large block of more than this part of MAX_PREFILL_BYTES is not predicted. */
#define LARGE_DIVISOR 6

static uint64_t large_pages(const struct endpoint *endpoint, uint32_t queue) {
    return atomic_load_explicit(&endpoint->large_pages[queue - SIZE_CLASSES], memory_order_relaxed);
}

/* The bytes that one magazine or block of a queue counts as. */
static size_t charge_of(const struct server *server, const struct endpoint *endpoint, uint32_t queue) {
    return prefill_queue_is_large(queue) ? (size_t)large_pages(endpoint, queue) * server->hooks.page_size
                                         : prefill_queue_charge(&server->layout.classes->of[queue]);
}

/* Brings seen_level and prefilled_bytes up to date. Returns the level. */
static uint32_t see_level(const struct server *server, struct endpoint *endpoint, uint32_t queue) {
    uint32_t level = prefill_queue_level(endpoint, queue);
    size_t charge = charge_of(server, endpoint, queue);
    endpoint->prefilled_bytes += level * charge;
    endpoint->prefilled_bytes -= endpoint->seen_level[queue] * charge;
    endpoint->seen_level[queue] = (uint8_t)level;
    return level;
}

/* True if the caller has entered the endpoint. waits: for the thread that is in, if any. */
static bool enter(const struct server *server, struct endpoint *endpoint, bool waits) {
    if (waits && !server->has_entered_all) {
        endpoint_enter(endpoint);
    }
    return waits || server->has_entered_all || endpoint_try(endpoint);
}

static void leave(const struct server *server, struct endpoint *endpoint) {
    if (!server->has_entered_all) {
        endpoint_leave(endpoint);
    }
}

/* Withdraws up to `count` magazines or large blocks, from the front of the queue. */
static void withdraw(struct server *server, struct endpoint *endpoint, uint32_t queue, uint32_t count,
                     bool waits) {
    for (; count > 0 && enter(server, endpoint, waits); count--) {
        void *blocks[MAX_MAGAZINE_BLOCKS];
        size_t got = prefill_queue_withdraw(&server->layout, endpoint, queue, blocks);
        leave(server, endpoint);
        if (got == 0) {
            return;
        }
        count_one(&server->counts.prefill_unused);
        server_put(server, queue, blocks, got);
    }
}

/* ---- predictions ---- */

/* Makes a large queue one for blocks of so many pages. False while it is another size's that is wanted. */
static bool adopt_size(struct server *server, struct endpoint *endpoint, uint32_t queue, uint64_t pages) {
    struct predictor *predictor = &endpoint->predictors[queue];
    if (large_pages(endpoint, queue) == pages) {
        return true;
    }
    if (predictor->target > 1) {
        predictor->target /= 2;
        return false;
    }
    withdraw(server, endpoint, queue, LARGE_QUEUE_BLOCKS, false);
    if (see_level(server, endpoint, queue) != 0) {
        return false;
    }
    atomic_store_explicit(&endpoint->large_pages[queue - SIZE_CLASSES], pages, memory_order_relaxed);
    *predictor = (struct predictor){0};
    return true;
}

void prefill_missed(struct server *server, struct endpoint *endpoint, uint32_t class, size_t pages) {
    uint32_t queue = class != 0 ? class : prefill_queue_of_pages(pages);
    if (class == 0 && (pages * server->hooks.page_size > MAX_PREFILL_BYTES / LARGE_DIVISOR ||
                       !adopt_size(server, endpoint, queue, pages))) {
        return;
    }
    predictor_missed(&endpoint->predictors[queue],
                     class != 0 ? server->layout.max_magazines[class] : LARGE_QUEUE_BLOCKS);
    bits_set(endpoint->predicted, queue);
    bits_set(endpoint->below_target, queue);
}

bool prefill_falls_behind(const struct endpoint *endpoint, uint32_t class, size_t pages) {
    uint32_t queue = class != 0 ? class : prefill_queue_of_pages(pages);
    return (class != 0 || large_pages(endpoint, queue) == pages) &&
           predictor_falls_behind(&endpoint->predictors[queue]);
}

bool prefill_sample(const struct server *server, struct endpoint *endpoint) {
    bool took = false;
    for (uint32_t queue = 0; (queue = bits_next(endpoint->predicted, queue, QUEUES)) < QUEUES; queue++) {
        uint32_t seen = endpoint->seen_level[queue];
        if (prefill_queue_level(endpoint, queue) != seen && see_level(server, endpoint, queue) < seen) {
            predictor_took(&endpoint->predictors[queue], endpoint->seen_level[queue]);
            bits_set(endpoint->below_target, queue);
            took = true;
        }
    }
    return took;
}

/* ---- to the clients ---- */

static size_t take_blocks(struct server *server, uint32_t queue, struct prefill_item *item, size_t count) {
    const struct server_hooks *hooks = &server->hooks;
    if (!prefill_queue_is_large(queue)) {
        return hooks->take(hooks->context, queue, item->blocks, count, 0);
    }
    item->blocks[0] = hooks->take_large(hooks->context, item->pages, 1, 0, &item->zero);
    return item->blocks[0] != NULL;
}

/* False if the queue needs no more, or has no room, or memory is short. */
static bool fill(struct server *server, struct endpoint *endpoint, uint32_t queue) {
    bool large = prefill_queue_is_large(queue);
    size_t charge = charge_of(server, endpoint, queue);
    bool bounded = large || endpoint->seen_level[queue] > 0;
    if (endpoint->seen_level[queue] >= endpoint->predictors[queue].target ||
        (bounded && endpoint->prefilled_bytes + charge > MAX_PREFILL_BYTES)) {
        bits_clear(endpoint->below_target, queue);
        return false;
    }
    void *blocks[MAX_MAGAZINE_BLOCKS];
    struct prefill_item item = {.blocks = blocks, .pages = large ? large_pages(endpoint, queue) : 0};
    size_t count = large ? 1 : server->layout.classes->of[queue].batch;
    size_t got = take_blocks(server, queue, &item, count);
    /* The hook may have served clients meanwhile, of this endpoint, too. */
    bool wanted = got == count && (!large || large_pages(endpoint, queue) == item.pages);
    if (!wanted || !prefill_queue_put(&server->layout, endpoint, queue, &item)) {
        bits_clear(endpoint->below_target, queue);
        server_put(server, queue, blocks, got);
        return false;
    }
    endpoint->seen_level[queue]++;
    endpoint->prefilled_bytes += charge;
    count_one(&server->counts.prefilled);
    return true;
}

bool prefill_one(struct server *server) {
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        unsigned next = (server->next_prefilled + i) % opened;
        struct endpoint *endpoint = server_open_endpoint(server, next);
        uint32_t queue;
        while ((queue = bits_next(endpoint->below_target, 0, QUEUES)) < QUEUES) {
            if (fill(server, endpoint, queue)) {
                server->next_prefilled = next + 1;
                return true;
            }
        }
    }
    return false;
}

/* ---- the end of an epoch ---- */

/* Returns the unused part of a client cache, and begins the next epoch. */
static void end_cache_epoch(struct server *server, struct endpoint *endpoint, uint32_t class, bool waits) {
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t got = 1;
    while (got > 0 && client_cache_level(endpoint, class) > 0 && enter(server, endpoint, waits)) {
        got = client_cache_take_unused(&server->layout, endpoint, class, blocks);
        if (got == 0) {
            client_cache_begin_epoch(endpoint, class);
        }
        leave(server, endpoint);
        server_put(server, class, blocks, got);
    }
}

bool prefill_end_epoch(struct server *server, struct endpoint *endpoint) {
    bool remains = false;
    for (uint32_t class = 1; class < server->layout.classes->count; ++class) {
        end_cache_epoch(server, endpoint, class, false);
        remains |= client_cache_level(endpoint, class) > 0;
    }
    for (uint32_t queue = 0; (queue = bits_next(endpoint->predicted, queue, QUEUES)) < QUEUES; queue++) {
        struct predictor *predictor = &endpoint->predictors[queue];
        uint32_t surplus = predictor_end_epoch(predictor, see_level(server, endpoint, queue));
        withdraw(server, endpoint, queue, surplus, false);
        bits_set(endpoint->below_target, queue);
        if (see_level(server, endpoint, queue) > 0 || !predictor_is_quiet(predictor)) {
            remains = true;
        } else {
            bits_clear(endpoint->predicted, queue);
        }
    }
    return remains;
}

void prefill_withdraw_all(struct server *server) {
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        struct endpoint *endpoint = server_open_endpoint(server, i);
        for (uint32_t queue = 0; queue < QUEUES; queue++) {
            endpoint->predictors[queue] = (struct predictor){0};
            withdraw(server, endpoint, queue, prefill_queue_level(endpoint, queue), true);
            see_level(server, endpoint, queue);
        }
        for (uint32_t class = 1; class < server->layout.classes->count; ++class) {
            end_cache_epoch(server, endpoint, class, true); /* what is left counts as unused from now on */
            end_cache_epoch(server, endpoint, class, true);
        }
    }
}

/* ---- numbers ---- */

size_t prefill_blocks(const struct server *server, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (unsigned i = 0, opened = server_opened(server); i < opened; i++) {
        const struct endpoint *endpoint = server_open_endpoint(server, i);
        for (uint32_t class = 1; class < server->layout.classes->count; ++class) {
            const struct size_class *of = &server->layout.classes->of[class];
            /* Read while they change, put and taken may not match: the rest bounds the error. */
            uint32_t magazines = prefill_queue_level(endpoint, class) % (MAX_PREFILLED_MAGAZINES + 1);
            size_t held = (size_t)magazines * of->batch + client_cache_level(endpoint, class);
            blocks += held;
            *bytes += held * of->size;
        }
        for (uint32_t queue = SIZE_CLASSES; queue < QUEUES; queue++) {
            size_t pages = (size_t)large_pages(endpoint, queue);
            pages *= prefill_queue_level(endpoint, queue) % (LARGE_QUEUE_BLOCKS + 1);
            blocks += pages;
            *bytes += pages * server->hooks.page_size;
        }
    }
    return blocks;
}

size_t prefill_max_blocks(const struct server *server, size_t *bytes) {
    size_t blocks = MAX_PREFILL_BYTES / MIN_PREFILL_CHARGE;
    *bytes = MAX_PREFILL_BYTES;
    for (uint32_t class = 1; class < server->layout.classes->count; ++class) {
        const struct size_class *of = &server->layout.classes->of[class];
        size_t held = of->batch + server->layout.max_cached[class];
        blocks += held;
        *bytes += held * of->size;
    }
    unsigned opened = server_opened(server);
    *bytes *= opened;
    return blocks * opened;
}
