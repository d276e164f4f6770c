#include "offload/prefill.h"

#include "arena/blocks.h"
#include "arena/large.h"
#include "base/assert.h"
#include "os/vm.h"

/* A large block of more than this part of MAX_PREFILL_BYTES is not
 * predicted. */
#define LARGE_DIVISOR 6

static uint64_t large_pages(const struct endpoint *endpoint, uint32_t queue) {
    return atomic_load_explicit(&endpoint->large_pages[queue - SIZE_CLASSES], memory_order_relaxed);
}

/* The bytes that one magazine or block of a queue counts as. */
static size_t charge_of(const struct server *server, const struct endpoint *endpoint, uint32_t queue) {
    return prefill_queue_is_large(queue) ? (size_t)large_pages(endpoint, queue) * vm_page_size()
                                         : prefill_queue_charge(&server->setup.layout.classes->of[queue]);
}

/* Brings seen_level and prefilled_bytes up to date. Returns the level. */
static uint32_t see_level(const struct server *server, struct endpoint *endpoint, uint32_t queue) {
    uint32_t level = prefill_queue_level(endpoint, queue);
    size_t charge = charge_of(server, endpoint, queue);
    endpoint->prefilled_bytes += level * charge;
    calm_assert(endpoint->prefilled_bytes >= endpoint->seen_level[queue] * charge, queue, charge);
    endpoint->prefilled_bytes -= endpoint->seen_level[queue] * charge;
    endpoint->seen_level[queue] = (uint8_t)level;
    return level;
}

/* A request for what a queue has. */
static struct request request_of(const struct endpoint *endpoint, uint32_t queue, void **blocks,
                                 size_t count) {
    struct request request = {.size_class = queue, .blocks = blocks, .count = count};
    if (prefill_queue_is_large(queue)) {
        request.size_class = 0;
        request.pages = large_pages(endpoint, queue);
        request.align_pages = 1;
    }
    return request;
}

/* Withdraws up to `count` magazines or large blocks, from the front of the
 * queue. Blocks go to the heap while clients may enter, unless the caller has
 * entered. */
static void withdraw(struct server *server, struct endpoint *endpoint, uint32_t queue, uint32_t count) {
    bool mine = endpoint_is_mine(endpoint);
    for (; count > 0 && prefill_queue_level(endpoint, queue) > 0 && (mine || endpoint_enter(endpoint, 0));
         count--) {
        void *blocks[MAX_MAGAZINE_BLOCKS];
        struct request one = request_of(endpoint, queue, blocks, 1);
        size_t got = prefill_queue_take(endpoint, &one);
        if (!mine) {
            endpoint_leave(endpoint);
        }
        if (got == 0) {
            return;
        }
        count_one(&server->counts.prefill_unused);
        server_put(server, one.size_class, blocks, got);
    }
}

/* ---- predictions ---- */

/* Makes a large queue one for blocks of so many pages. False while it is
 * another size's that is wanted. */
static bool adopt_size(struct server *server, struct endpoint *endpoint, uint32_t queue, uint64_t pages) {
    struct predictor *predictor = &endpoint->predictors[queue];
    if (large_pages(endpoint, queue) == pages) {
        return true;
    }
    if (predictor->target > 1) {
        predictor->target /= 2;
        return false;
    }
    withdraw(server, endpoint, queue, LARGE_QUEUE_BLOCKS);
    if (see_level(server, endpoint, queue) != 0) {
        return false;
    }
    atomic_store_explicit(&endpoint->large_pages[queue - SIZE_CLASSES], pages, memory_order_relaxed);
    *predictor = (struct predictor){0};
    return true;
}

void prefill_missed(struct server *server, struct endpoint *endpoint, const struct request *request) {
    uint32_t queue = prefill_queue_for(request);
    if (request->size_class == 0 && (request->pages * vm_page_size() > MAX_PREFILL_BYTES / LARGE_DIVISOR ||
                                     !adopt_size(server, endpoint, queue, request->pages))) {
        return;
    }
    predictor_missed(&endpoint->predictors[queue], server->setup.layout.queues[queue].max_ready);
    bits_set(endpoint->predicted, queue);
    bits_set(endpoint->below_target, queue);
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

/* Takes blocks from the heap ahead of demand: a whole magazine, in several
 * parts if need be, or a large block, whose pages are made resident. False if
 * memory is short. */
static bool take_ahead(struct server *server, struct request *request) {
    struct arenas *arenas = server->setup.arenas;
    if (request->size_class == 0) {
        request->blocks[0] = arena_take_large(arenas, request->pages, 1, false, &request->zero);
        if (request->blocks[0] != NULL && request->zero) {
            vm_prefault(request->blocks[0], request->pages * vm_page_size());
        }
        return request->blocks[0] != NULL;
    }
    size_t wanted = request->count;
    size_t got = 1;
    for (request->count = 0; got > 0 && request->count < wanted; request->count += got) {
        got = arena_take_blocks(arenas, request->size_class, request->blocks + request->count,
                                wanted - request->count);
    }
    return request->count == wanted;
}

/* False if the queue needs no more, or has no room, or memory is short. */
static bool prefill_fill_queue(struct server *server, struct endpoint *endpoint, uint32_t queue) {
    bool large = prefill_queue_is_large(queue);
    size_t charge = charge_of(server, endpoint, queue);
    bool bounded = large || endpoint->seen_level[queue] > 0;
    if (endpoint->seen_level[queue] >= endpoint->predictors[queue].target ||
        (bounded && endpoint->prefilled_bytes + charge > MAX_PREFILL_BYTES)) {
        bits_clear(endpoint->below_target, queue);
        return false;
    }
    void *blocks[MAX_MAGAZINE_BLOCKS];
    struct request request = request_of(endpoint, queue, blocks, server->setup.layout.queues[queue].blocks);
    bool taken = take_ahead(server, &request);
    if (!taken || !prefill_queue_put(endpoint, &request)) {
        bits_clear(endpoint->below_target, queue);
        server_put(server, request.size_class, blocks, large && !taken ? 0 : request.count);
        return false;
    }
    calm_assert(endpoint->seen_level[queue] < server->setup.layout.queues[queue].depth, queue);
    endpoint->seen_level[queue]++;
    endpoint->prefilled_bytes += charge;
    count_one(&server->counts.prefilled);
    return true;
}

bool prefill_one(struct server *server) {
    struct endpoint *last_opened = server_endpoints(server);
    struct endpoint *start =
        server->locked.next_prefilled != NULL ? server->locked.next_prefilled : last_opened;
    struct endpoint *endpoint = start;
    do {
        struct endpoint *next = endpoint->next != NULL ? endpoint->next : last_opened;
        uint32_t queue;
        while ((queue = bits_next(endpoint->below_target, 0, QUEUES)) < QUEUES) {
            if (prefill_fill_queue(server, endpoint, queue)) {
                server->locked.next_prefilled = next;
                return true;
            }
        }
        endpoint = next;
    } while (endpoint != start);
    return false;
}

/* ---- the end of an epoch ---- */

/* Returns the unused part of a client cache, and begins the next epoch. */
static void end_cache_epoch(struct server *server, struct endpoint *endpoint, uint32_t size_class) {
    void *blocks[MAX_MAGAZINE_BLOCKS];
    size_t got = 1;
    bool mine = endpoint_is_mine(endpoint);
    while (got > 0 && client_cache_level(endpoint, size_class) > 0 && (mine || endpoint_enter(endpoint, 0))) {
        got = client_cache_take_unused(endpoint, size_class, blocks);
        if (!mine) {
            endpoint_leave(endpoint);
        }
        server_put(server, size_class, blocks, got);
    }
}

bool prefill_end_epoch(struct server *server, struct endpoint *endpoint) {
    bool remains = false;
    for (uint32_t size_class = 1; size_class < server->setup.layout.classes->count; ++size_class) {
        end_cache_epoch(server, endpoint, size_class);
        remains |= client_cache_level(endpoint, size_class) > 0;
    }
    for (uint32_t queue = 0; (queue = bits_next(endpoint->predicted, queue, QUEUES)) < QUEUES; queue++) {
        struct predictor *predictor = &endpoint->predictors[queue];
        uint32_t surplus = predictor_end_epoch(predictor, see_level(server, endpoint, queue));
        withdraw(server, endpoint, queue, surplus);
        bits_set(endpoint->below_target, queue);
        if (see_level(server, endpoint, queue) > 0 || predictor->target > 0) {
            remains = true;
        } else {
            bits_clear(endpoint->predicted, queue);
        }
    }
    return remains;
}

void prefill_withdraw(struct server *server, struct endpoint *endpoint) {
    calm_assert(endpoint_is_mine(endpoint));
    for (uint32_t queue = 0; queue < QUEUES; queue++) {
        endpoint->predictors[queue] = (struct predictor){0};
        withdraw(server, endpoint, queue, prefill_queue_level(endpoint, queue));
        see_level(server, endpoint, queue);
    }
    for (uint32_t size_class = 1; size_class < server->setup.layout.classes->count; ++size_class) {
        end_cache_epoch(server, endpoint, size_class); /* what is left counts as unused from now on */
        end_cache_epoch(server, endpoint, size_class);
    }
}

/* ---- numbers ---- */

size_t prefill_blocks(const struct server *server, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        for (uint32_t size_class = 1; size_class < server->setup.layout.classes->count; ++size_class) {
            const struct size_class *of = &server->setup.layout.classes->of[size_class];
            /* Read while they change, put and taken may not match: the rest
             * bounds the error. */
            uint32_t magazines = prefill_queue_level(endpoint, size_class) % (MAX_PREFILLED_MAGAZINES + 1);
            size_t held = (size_t)magazines * of->batch + client_cache_level(endpoint, size_class);
            blocks += held;
            *bytes += held * of->size;
        }
        for (uint32_t queue = SIZE_CLASSES; queue < QUEUES; queue++) {
            size_t pages = (size_t)large_pages(endpoint, queue);
            pages *= prefill_queue_level(endpoint, queue) % (LARGE_QUEUE_BLOCKS + 1);
            blocks += pages;
            *bytes += pages * vm_page_size();
        }
    }
    return blocks;
}

size_t prefill_max_blocks(const struct server *server, size_t *bytes) {
    size_t blocks = MAX_PREFILL_BYTES / MIN_PREFILL_CHARGE;
    *bytes = MAX_PREFILL_BYTES;
    for (uint32_t size_class = 1; size_class < server->setup.layout.classes->count; ++size_class) {
        const struct size_class *of = &server->setup.layout.classes->of[size_class];
        size_t held = of->batch + server->setup.layout.max_cached[size_class];
        blocks += held;
        *bytes += held * of->size;
    }
    size_t opened = 0;
    for (struct endpoint *endpoint = server_endpoints(server); endpoint != NULL; endpoint = endpoint->next) {
        opened++;
    }
    *bytes *= opened;
    return blocks * opened;
}
