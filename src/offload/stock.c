#include "offload/stock.h"

#include "offload/spare.h"

#include <string.h>

#define LARGE_READY_DIVISOR 6 /* a large block of more than this part of the bound is never made ready */

static uint32_t load(const _Atomic(uint32_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static size_t magazine_charge(const struct size_class *class) {
    size_t size = class->size < STOCK_CHARGE_LEAST ? STOCK_CHARGE_LEAST : class->size;
    return size * class->batch;
}

static size_t large_charge(const struct server *server, uint64_t pages) {
    return (size_t)pages * server->owner.page_size;
}

uint32_t stock_prepare(struct server *server) {
    const struct size_classes *classes = server->owner.classes;
    uint32_t words = 0;
    for (uint32_t class = 1; class < classes->count; ++class) {
        server->start_of[class] = words;
        size_t most = STOCK_CLASS_BYTES / magazine_charge(&classes->of[class]);
        most = most < 2 ? 2 : most > STOCK_MAGAZINES ? STOCK_MAGAZINES : most;
        size_t depth = 2;
        while (depth < most) {
            depth *= 2;
        }
        server->stock_most[class] = (uint8_t)most;
        server->stock_depth[class] = (uint8_t)depth;
        words += (uint32_t)(depth * server_magazine_words(server, class));
    }
    return words;
}

static uint32_t level_of(const struct endpoint *endpoint, uint32_t class) {
    return load(&endpoint->put[class]) - atomic_load_explicit(&endpoint->taken[class], memory_order_acquire);
}

static uint32_t large_level_of(const struct large_stock *stock) {
    return load(&stock->put) - atomic_load_explicit(&stock->taken, memory_order_acquire);
}

static uint32_t see_level(const struct server *server, struct endpoint *endpoint, uint32_t class) {
    uint32_t level = level_of(endpoint, class);
    size_t charge = magazine_charge(&server->owner.classes->of[class]);
    endpoint->stock_bytes += level * charge;
    endpoint->stock_bytes -= endpoint->level_seen[class] * charge;
    endpoint->level_seen[class] = (uint8_t)level;
    return level;
}

/* One was put: what was taken meanwhile is seen at the next look. */
static void add_level(const struct server *server, struct endpoint *endpoint, uint32_t class) {
    endpoint->level_seen[class]++;
    endpoint->stock_bytes += magazine_charge(&server->owner.classes->of[class]);
}

static uint32_t see_large_level(const struct server *server, struct endpoint *endpoint, uint32_t place) {
    struct large_stock *stock = &endpoint->large[place];
    uint32_t level = large_level_of(stock);
    size_t charge = large_charge(server, large_pages(stock));
    endpoint->stock_bytes += level * charge;
    endpoint->stock_bytes -= endpoint->large_seen[place] * charge;
    endpoint->large_seen[place] = (uint8_t)level;
    return level;
}

static void mark(uint64_t *words, uint32_t bit) {
    words[bit / 64] |= (uint64_t)1 << (bit % 64);
}

static void unmark(uint64_t *words, uint32_t bit) {
    words[bit / 64] &= ~((uint64_t)1 << (bit % 64));
}

bool stock_scan(const struct server *server, struct endpoint *endpoint) {
    bool took = false;
    for (unsigned word = 0; word < CLASS_WORDS; word++) {
        for (uint64_t left = endpoint->active[word]; left != 0; left &= left - 1) {
            uint32_t class = word * 64 + (uint32_t)__builtin_ctzll(left);
            uint32_t seen = endpoint->level_seen[class];
            if (level_of(endpoint, class) != seen && see_level(server, endpoint, class) < seen) {
                predictor_took(&endpoint->predictors[class], endpoint->level_seen[class]);
                mark(endpoint->hungry, class);
                took = true;
            }
        }
    }
    for (uint32_t left = endpoint->large_active; left != 0; left &= left - 1) {
        uint32_t place = (uint32_t)__builtin_ctz(left);
        uint32_t seen = endpoint->large_seen[place];
        if (large_level_of(&endpoint->large[place]) != seen &&
            see_large_level(server, endpoint, place) < seen) {
            predictor_took(&endpoint->large[place].predictor, endpoint->large_seen[place]);
            endpoint->large_hungry |= 1U << place;
            took = true;
        }
    }
    return took;
}

/* One magazine more, if one is expected. False if there was nothing to do, or no memory. */
static bool feed_class(struct server *server, struct endpoint *endpoint, uint32_t class) {
    const struct size_class *of = &server->owner.classes->of[class];
    uint32_t target = endpoint->predictors[class].target;
    if (endpoint->level_seen[class] >= target ||
        (endpoint->level_seen[class] > 0 && endpoint->stock_bytes + magazine_charge(of) > STOCK_BYTES_MOST)) {
        unmark(endpoint->hungry, class);
        return false;
    }
    void *blocks[MAGAZINE_BLOCKS_MOST];
    size_t got = server->owner.take(server->owner.context, class, blocks, of->batch, 0);
    /* Meanwhile more may have been served, also here: from here on nothing else happens. */
    uint32_t put = load(&endpoint->put[class]);
    if (got < of->batch || level_of(endpoint, class) >= server->stock_depth[class]) {
        unmark(endpoint->hungry, class);
        if (got > 0) {
            server->owner.put(server->owner.context, class, blocks, got);
        }
        return false;
    }
    struct magazine *magazine = server_magazine(server, endpoint, class, put);
    memcpy(magazine->blocks, blocks, got * sizeof *blocks);
    atomic_store_explicit(&magazine->filled, (uint64_t)put + 1, memory_order_release);
    atomic_store_explicit(&endpoint->put[class], put + 1, memory_order_release);
    add_level(server, endpoint, class);
    server_count(&server->counts.stocked);
    return true;
}

static bool feed_large(struct server *server, struct endpoint *endpoint, uint32_t place) {
    struct large_stock *stock = &endpoint->large[place];
    uint64_t pages = large_pages(stock);
    if (endpoint->large_seen[place] >= stock->predictor.target ||
        endpoint->stock_bytes + large_charge(server, pages) > STOCK_BYTES_MOST) {
        endpoint->large_hungry &= ~(1U << place);
        return false;
    }
    bool zero;
    void *block = server->owner.take_large(server->owner.context, pages, 1, 0, &zero);
    uint32_t put = load(&stock->put);
    if (block == NULL || large_pages(stock) != pages || large_level_of(stock) >= LARGE_BLOCKS) {
        endpoint->large_hungry &= ~(1U << place);
        if (block != NULL) {
            server->owner.put_large(server->owner.context, block);
        }
        return false;
    }
    struct ready_block *ready = &stock->ready[put % LARGE_BLOCKS];
    ready->block = block;
    ready->pages = pages;
    ready->zero = zero;
    atomic_store_explicit(&ready->filled, (uint64_t)put + 1, memory_order_release);
    atomic_store_explicit(&stock->put, put + 1, memory_order_release);
    endpoint->large_seen[place]++;
    endpoint->stock_bytes += large_charge(server, pages);
    server_count(&server->counts.stocked);
    return true;
}

/* One piece of what is expected, so that who calls meanwhile waits for no more than that. */
static bool feed_endpoint(struct server *server, struct endpoint *endpoint) {
    for (unsigned word = 0; word < CLASS_WORDS; word++) {
        while (endpoint->hungry[word] != 0) {
            uint32_t class = word * 64 + (uint32_t)__builtin_ctzll(endpoint->hungry[word]);
            if (feed_class(server, endpoint, class)) {
                return true;
            }
        }
    }
    while (endpoint->large_hungry != 0) {
        if (feed_large(server, endpoint, (uint32_t)__builtin_ctz(endpoint->large_hungry))) {
            return true;
        }
    }
    return false;
}

bool stock_feed(struct server *server) {
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned next = (server->next_fed + i) % opened;
        unsigned number = atomic_load_explicit(&server->open[next], memory_order_relaxed);
        if (feed_endpoint(server, server_endpoint(server, number))) {
            server->next_fed = next + 1;
            return true;
        }
    }
    return false;
}

/* Whether the caller is in the endpoint now: of what must go back it waits for who is in. */
static bool enter(const struct server *server, struct endpoint *endpoint, bool waits) {
    if (server->in_all) {
        return true;
    }
    if (waits) {
        endpoint_enter(endpoint);
        return true;
    }
    return endpoint_try(endpoint);
}

static void leave(const struct server *server, struct endpoint *endpoint) {
    if (!server->in_all) {
        endpoint_leave(endpoint);
    }
}

/* Takes magazines back from the front, as a client would. */
static void withdraw(struct server *server, struct endpoint *endpoint, uint32_t class, uint32_t count,
                     bool waits) {
    size_t batch = server->owner.classes->of[class].batch;
    for (; count > 0 && enter(server, endpoint, waits); count--) {
        void *blocks[MAGAZINE_BLOCKS_MOST];
        bool any = level_of(endpoint, class) > 0;
        if (any) {
            uint32_t taken = load(&endpoint->taken[class]);
            memcpy(blocks, server_magazine(server, endpoint, class, taken)->blocks, batch * sizeof *blocks);
            atomic_store_explicit(&endpoint->taken[class], taken + 1, memory_order_release);
        }
        leave(server, endpoint);
        if (!any) {
            return;
        }
        server_count(&server->counts.unused);
        server->owner.put(server->owner.context, class, blocks, batch);
    }
}

static void withdraw_large(struct server *server, struct endpoint *endpoint, uint32_t place, uint32_t count,
                           bool waits) {
    struct large_stock *stock = &endpoint->large[place];
    for (; count > 0 && enter(server, endpoint, waits); count--) {
        void *block = NULL;
        if (large_level_of(stock) > 0) {
            uint32_t taken = load(&stock->taken);
            block = stock->ready[taken % LARGE_BLOCKS].block;
            atomic_store_explicit(&stock->taken, taken + 1, memory_order_release);
        }
        leave(server, endpoint);
        if (block == NULL) {
            return;
        }
        server_count(&server->counts.unused);
        server->owner.put_large(server->owner.context, block);
    }
}

/* What is known not to be wanted goes back, and the next window begins. */
static void end_spare_window(struct server *server, struct endpoint *endpoint, uint32_t class, bool waits) {
    void *blocks[MAGAZINE_BLOCKS_MOST];
    size_t got = 1;
    while (got > 0 && spare_level(endpoint, class) > 0 && enter(server, endpoint, waits)) {
        got = spare_take_unwanted(server, endpoint, class, blocks);
        if (got == 0) {
            spare_begin_window(endpoint, class);
        }
        leave(server, endpoint);
        if (got > 0) {
            server->owner.put(server->owner.context, class, blocks, got);
        }
    }
}

static void withdraw_spare(struct server *server, struct endpoint *endpoint, uint32_t class) {
    end_spare_window(server, endpoint, class, true); /* from now on all that lies there is unwanted */
    end_spare_window(server, endpoint, class, true);
}

bool stock_end_window(struct server *server, struct endpoint *endpoint) {
    bool remains = false;
    for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
        end_spare_window(server, endpoint, class, false);
        remains |= spare_level(endpoint, class) > 0;
    }
    for (unsigned word = 0; word < CLASS_WORDS; word++) {
        for (uint64_t left = endpoint->active[word]; left != 0; left &= left - 1) {
            uint32_t class = word * 64 + (uint32_t)__builtin_ctzll(left);
            struct predictor *predictor = &endpoint->predictors[class];
            uint32_t surplus = predictor_end_window(predictor, see_level(server, endpoint, class));
            withdraw(server, endpoint, class, surplus, false);
            see_level(server, endpoint, class);
            mark(endpoint->hungry, class);
            if (predictor_is_quiet(predictor) && level_of(endpoint, class) == 0) {
                unmark(endpoint->active, class);
            } else {
                remains = true;
            }
        }
    }
    for (uint32_t left = endpoint->large_active; left != 0; left &= left - 1) {
        uint32_t place = (uint32_t)__builtin_ctz(left);
        struct large_stock *stock = &endpoint->large[place];
        uint32_t surplus = predictor_end_window(&stock->predictor, see_large_level(server, endpoint, place));
        withdraw_large(server, endpoint, place, surplus, false);
        endpoint->large_hungry |= 1U << place;
        if (see_large_level(server, endpoint, place) == 0 && predictor_is_quiet(&stock->predictor)) {
            endpoint->large_active &= ~(1U << place);
        } else {
            remains = true;
        }
    }
    return remains;
}

void stock_withdraw_all(struct server *server) {
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        struct endpoint *endpoint =
            server_endpoint(server, atomic_load_explicit(&server->open[i], memory_order_relaxed));
        for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
            endpoint->predictors[class] = (struct predictor){0};
            withdraw(server, endpoint, class, level_of(endpoint, class), true);
            see_level(server, endpoint, class);
            withdraw_spare(server, endpoint, class);
        }
        for (uint32_t place = 0; place < LARGE_PLACES; place++) {
            endpoint->large[place].predictor = (struct predictor){0};
            withdraw_large(server, endpoint, place, large_level_of(&endpoint->large[place]), true);
            see_large_level(server, endpoint, place);
        }
    }
}

size_t stock_blocks(const struct server *server, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        const struct endpoint *endpoint =
            server_endpoint(server, atomic_load_explicit(&server->open[i], memory_order_relaxed));
        for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
            const struct size_class *of = &server->owner.classes->of[class];
            size_t held = (size_t)(level_of(endpoint, class) % (STOCK_MAGAZINES + 1)) * of->batch;
            held += spare_level(endpoint, class);
            blocks += held;
            *bytes += held * of->size;
        }
        for (uint32_t place = 0; place < LARGE_PLACES; place++) {
            const struct large_stock *stock = &endpoint->large[place];
            size_t pages = (large_level_of(stock) % (LARGE_BLOCKS + 1)) * (size_t)large_pages(stock);
            blocks += pages;
            *bytes += pages * server->owner.page_size;
        }
    }
    return blocks;
}

size_t stock_blocks_most(const struct server *server, size_t *bytes) {
    size_t blocks = STOCK_BYTES_MOST / STOCK_CHARGE_LEAST;
    *bytes = STOCK_BYTES_MOST;
    for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
        const struct size_class *of = &server->owner.classes->of[class];
        size_t most = of->batch + server->spare_most[class];
        blocks += most;
        *bytes += most * of->size;
    }
    size_t opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    *bytes *= opened;
    return blocks * opened;
}

void stock_expect(struct server *server, struct endpoint *endpoint, uint32_t class) {
    predictor_missed(&endpoint->predictors[class], server->stock_most[class]);
    mark(endpoint->active, class);
    mark(endpoint->hungry, class);
}

void stock_expect_large(struct server *server, struct endpoint *endpoint, uint64_t pages) {
    uint32_t place = large_place(pages);
    struct large_stock *stock = &endpoint->large[place];
    if (large_charge(server, pages) > STOCK_BYTES_MOST / LARGE_READY_DIVISOR) {
        return;
    }
    if (large_pages(stock) != pages) {
        /* The place is another size's until that is not wanted any more. */
        if (stock->predictor.target > 1) {
            stock->predictor.target /= 2;
            return;
        }
        withdraw_large(server, endpoint, place, LARGE_BLOCKS, false);
        if (see_large_level(server, endpoint, place) != 0) {
            return;
        }
        atomic_store_explicit(&stock->pages, pages, memory_order_relaxed);
        stock->predictor = (struct predictor){0};
    }
    predictor_missed(&stock->predictor, LARGE_BLOCKS);
    endpoint->large_active |= 1U << place;
    endpoint->large_hungry |= 1U << place;
}
