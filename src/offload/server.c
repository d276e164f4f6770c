#include "offload/server.h"

#include "os/address_space.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/thread.h"

#include <string.h>

#define STACK_BYTES ((size_t)128 << 10)
/* Without work it looks around for so long before it naps. */
#define HOT_NS 200000ULL
/* The first nap; where it has no CPU to itself, and every wake is another thread's loss, a longer one. */
#define NAP_NS_LEAST   50000ULL
#define NAP_NS_CROWDED 2000000ULL
#define NAP_NS_MOST    100000000ULL
/* A window of the predictor. */
#define WINDOW_NS 100000000ULL
/* Passes between two looks at the clock while there is work. */
#define PASSES_PER_CLOCK 64
/* So often it looks whether others run on its CPU; it is crowded if it ran less than that share of the time.
 */
#define CROWD_LOOK_NS    8000000ULL
#define CROWD_SHARE      0.85
#define CROWDED_NS_LEAST 50000000ULL
#define CROWDED_NS_MOST  3200000000ULL
#define PARK_PATIENCE_NS 100000000ULL
#define LARGE_READY_DIVISOR \
    4 /* a large block of more than this part of the stock's bound is never made ready */

enum parking { PARKING_NONE, PARKING_REQUESTED, PARKING_PARKED };

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

bool server_init(struct server *server, unsigned endpoint_count) {
    const struct size_classes *classes = server->owner.classes;
    uint32_t slots = 0;
    for (uint32_t class = 1; class < classes->count; ++class) {
        server->start_of[class] = slots;
        slots += (uint32_t)STOCK_MAGAZINES * classes->of[class].batch;
        size_t most = STOCK_BYTES_MOST / 8 / magazine_charge(&classes->of[class]);
        server->stock_most[class] = (uint8_t)(most < 1 ? 1 : most > STOCK_MAGAZINES ? STOCK_MAGAZINES : most);
    }
    size_t page = os_page_size();
    size_t bytes = sizeof(struct endpoint) + slots * sizeof(void *);
    server->endpoint_bytes = (bytes + page - 1) & ~(page - 1);
    server->endpoint_count = endpoint_count;
    size_t lists = endpoint_count * (sizeof *server->open + sizeof *server->is_open);
    lists = (lists + page - 1) & ~(page - 1);
    char *memory = os_reserve(lists, page);
    if (memory == NULL || !os_commit(memory, lists)) {
        return false;
    }
    server->open = (_Atomic(uint16_t) *)(void *)memory;
    server->is_open = (_Atomic(bool) *)(void *)(memory + endpoint_count * sizeof *server->open);
    server->endpoints = os_reserve(endpoint_count * server->endpoint_bytes, page);
    server->nap_ns = NAP_NS_LEAST;
    return server->endpoints != NULL;
}

/* The stock. */

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

static uint32_t see_large_level(const struct server *server, struct endpoint *endpoint, uint32_t place) {
    struct large_stock *stock = &endpoint->large[place];
    uint32_t level = large_level_of(stock);
    size_t charge = large_charge(server, stock->pages);
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

/* One magazine more, if one is expected. False if there was nothing to do, or no memory. */
static bool feed_class(struct server *server, struct endpoint *endpoint, uint32_t class) {
    const struct size_class *of = &server->owner.classes->of[class];
    uint32_t target = endpoint->predictors[class].target;
    if (see_level(server, endpoint, class) >= target ||
        endpoint->stock_bytes + magazine_charge(of) > STOCK_BYTES_MOST) {
        unmark(endpoint->hungry, class);
        return false;
    }
    void *blocks[MAGAZINE_BLOCKS_MOST];
    size_t got = server->owner.take(server->owner.context, class, blocks, of->batch);
    /* Meanwhile more may have been served, also here: from here on nothing else happens. */
    uint32_t put = load(&endpoint->put[class]);
    if (got < of->batch || level_of(endpoint, class) >= STOCK_MAGAZINES) {
        unmark(endpoint->hungry, class);
        if (got > 0) {
            server->owner.put(server->owner.context, class, blocks, got);
        }
        return false;
    }
    memcpy(server_magazine(server, endpoint, class, put), blocks, got * sizeof *blocks);
    atomic_store_explicit(&endpoint->put[class], put + 1, memory_order_release);
    see_level(server, endpoint, class); /* which counts for whatever is fed next */
    server->counts.stocked++;
    return true;
}

static bool feed_large(struct server *server, struct endpoint *endpoint, uint32_t place) {
    struct large_stock *stock = &endpoint->large[place];
    uint64_t pages = stock->pages;
    if (see_large_level(server, endpoint, place) >= stock->predictor.target ||
        endpoint->stock_bytes + large_charge(server, pages) > STOCK_BYTES_MOST) {
        endpoint->large_hungry &= ~(1U << place);
        return false;
    }
    bool zero;
    void *block = server->owner.take_large(server->owner.context, pages, 1, 0, &zero);
    uint32_t put = load(&stock->put);
    if (block == NULL || stock->pages != pages || large_level_of(stock) >= LARGE_BLOCKS) {
        endpoint->large_hungry &= ~(1U << place);
        if (block != NULL) {
            server->owner.put_large(server->owner.context, block);
        }
        return false;
    }
    stock->ready[put % LARGE_BLOCKS] = (struct ready_block){block, pages, zero};
    atomic_store_explicit(&stock->put, put + 1, memory_order_release);
    see_large_level(server, endpoint, place);
    server->counts.stocked++;
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

static bool feed(struct server *server) {
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

/* Takes magazines back from the front, as a client would. */
static void withdraw(struct server *server, struct endpoint *endpoint, uint32_t class, uint32_t count) {
    size_t batch = server->owner.classes->of[class].batch;
    for (; count > 0 && lock_try(&endpoint->lock); count--) {
        void *blocks[MAGAZINE_BLOCKS_MOST];
        bool any = level_of(endpoint, class) > 0;
        if (any) {
            uint32_t taken = load(&endpoint->taken[class]);
            memcpy(blocks, server_magazine(server, endpoint, class, taken), batch * sizeof *blocks);
            atomic_store_explicit(&endpoint->taken[class], taken + 1, memory_order_release);
        }
        lock_release(&endpoint->lock);
        if (!any) {
            return;
        }
        server->counts.unused++;
        server->owner.put(server->owner.context, class, blocks, batch);
    }
}

static void withdraw_large(struct server *server, struct endpoint *endpoint, uint32_t place, uint32_t count) {
    struct large_stock *stock = &endpoint->large[place];
    for (; count > 0 && lock_try(&endpoint->lock); count--) {
        void *block = NULL;
        if (large_level_of(stock) > 0) {
            uint32_t taken = load(&stock->taken);
            block = stock->ready[taken % LARGE_BLOCKS].block;
            atomic_store_explicit(&stock->taken, taken + 1, memory_order_release);
        }
        lock_release(&endpoint->lock);
        if (block == NULL) {
            return;
        }
        server->counts.unused++;
        server->owner.put_large(server->owner.context, block);
    }
}

/* The window is over: what nobody wanted goes back. */
static void end_window(struct server *server, struct endpoint *endpoint) {
    for (unsigned word = 0; word < CLASS_WORDS; word++) {
        for (uint64_t left = endpoint->active[word]; left != 0; left &= left - 1) {
            uint32_t class = word * 64 + (uint32_t)__builtin_ctzll(left);
            struct predictor *predictor = &endpoint->predictors[class];
            uint32_t surplus = predictor_end_window(predictor, see_level(server, endpoint, class));
            withdraw(server, endpoint, class, surplus);
            see_level(server, endpoint, class);
            mark(endpoint->hungry, class);
            if (predictor_is_quiet(predictor) && level_of(endpoint, class) == 0) {
                unmark(endpoint->active, class);
            }
        }
    }
    for (uint32_t place = 0; place < LARGE_PLACES; place++) {
        struct large_stock *stock = &endpoint->large[place];
        uint32_t surplus = predictor_end_window(&stock->predictor, see_large_level(server, endpoint, place));
        withdraw_large(server, endpoint, place, surplus);
        see_large_level(server, endpoint, place);
        endpoint->large_hungry |= 1U << place;
    }
}

void server_withdraw_all(struct server *server) {
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        struct endpoint *endpoint =
            server_endpoint(server, atomic_load_explicit(&server->open[i], memory_order_relaxed));
        for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
            endpoint->predictors[class] = (struct predictor){0};
            withdraw(server, endpoint, class, level_of(endpoint, class));
            see_level(server, endpoint, class);
        }
        for (uint32_t place = 0; place < LARGE_PLACES; place++) {
            endpoint->large[place].predictor = (struct predictor){0};
            withdraw_large(server, endpoint, place, large_level_of(&endpoint->large[place]));
            see_large_level(server, endpoint, place);
        }
    }
}

size_t server_stock(const struct server *server, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        const struct endpoint *endpoint =
            server_endpoint(server, atomic_load_explicit(&server->open[i], memory_order_relaxed));
        for (uint32_t class = 1; class < server->owner.classes->count; ++class) {
            const struct size_class *of = &server->owner.classes->of[class];
            size_t held = (size_t)(level_of(endpoint, class) % (STOCK_MAGAZINES + 1)) * of->batch;
            blocks += held;
            *bytes += held * of->size;
        }
    }
    return blocks;
}

size_t server_stock_most(const struct server *server, size_t *bytes) {
    size_t opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    *bytes = opened * STOCK_BYTES_MOST;
    return opened * (STOCK_BYTES_MOST / STOCK_CHARGE_LEAST);
}

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

/* A client had to ask: more is to be ready from now on. */
static void expect_class(struct server *server, struct endpoint *endpoint, uint32_t class) {
    predictor_missed(&endpoint->predictors[class], server->stock_most[class]);
    mark(endpoint->active, class);
    mark(endpoint->hungry, class);
}

static void expect_large(struct server *server, struct endpoint *endpoint, uint64_t pages) {
    uint32_t place = large_place(pages);
    struct large_stock *stock = &endpoint->large[place];
    if (large_charge(server, pages) > STOCK_BYTES_MOST / LARGE_READY_DIVISOR) {
        return;
    }
    if (stock->pages != pages) {
        /* The place is another size's until that is not wanted any more. */
        if (stock->predictor.target > 1) {
            stock->predictor.target /= 2;
            return;
        }
        withdraw_large(server, endpoint, place, LARGE_BLOCKS);
        if (see_large_level(server, endpoint, place) != 0) {
            return;
        }
        stock->pages = pages;
        stock->predictor = (struct predictor){0};
    }
    predictor_missed(&stock->predictor, LARGE_BLOCKS);
    endpoint->large_hungry |= 1U << place;
}

static void serve_call(struct server *server, struct endpoint *endpoint, uint8_t slot) {
    struct call *call = &server->calls[slot];
    if (call->kind == CALL_LONG && server->depth > 1) {
        /* In the middle of other long work: after that. */
        server->deferred[server->deferred_count++ % CALLS] = slot;
        return;
    }
    if (!take_call(call)) {
        return;
    }
    server->counts.calls++;
    void *context = server->owner.context;
    /* Another client may have the slot as soon as the call is answered. */
    enum call_kind kind = call->kind;
    uint32_t class = call->class;
    size_t pages = call->pages;
    bool plain = call->align_pages <= 1;
    switch (kind) {
    case CALL_BLOCKS:
        call->count = server->owner.take(context, class, call->blocks, call->count);
        break;
    case CALL_LARGE:
        call->block = server->owner.take_large(context, pages, call->align_pages, call->flags, &call->zero);
        break;
    case CALL_SHORT:
    case CALL_LONG:
        call->work(call->subject);
        break;
    }
    answer_call(server, call);
    if (kind == CALL_BLOCKS && endpoint != NULL) {
        expect_class(server, endpoint, class);
    } else if (kind == CALL_LARGE && endpoint != NULL && plain) {
        expect_large(server, endpoint, pages);
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
    case RECORD_TOOK:
        predictor_took(&endpoint->predictors[subject], level_of(endpoint, subject));
        mark(endpoint->hungry, subject);
        break;
    case RECORD_TOOK_LARGE:
        predictor_took(&endpoint->large[subject].predictor, large_level_of(&endpoint->large[subject]));
        endpoint->large_hungry |= 1U << subject;
        break;
    case RECORD_CALL:
        serve_call(server, endpoint, (uint8_t)subject);
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
        server->counts.records++;
        size_t now = ring_filled(&endpoint->ring, false);
        filled = filled < now ? filled : now;
    }
    return true;
}

/* What found no room, or no server. Each block leads to the next by its first word. */
static bool serve_overflow(struct server *server) {
    if (atomic_load_explicit(&server->overflow, memory_order_relaxed) == NULL) {
        return false;
    }
    void *block = atomic_exchange_explicit(&server->overflow, NULL, memory_order_acquire);
    while (block != NULL) {
        void *next = *(void **)block;
        uint32_t class = server->owner.class_of(server->owner.context, block);
        if (class != 0) {
            server->owner.put(server->owner.context, class, &block, 1);
        } else {
            server->owner.put_large(server->owner.context, block);
        }
        block = next;
    }
    return true;
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
    } else if (server->owner.take(context, sync->class, &sync->block, 1) == 0) {
        sync->block = NULL;
    }
    atomic_store_explicit(&sync->ready, SYNC_NONE, memory_order_relaxed);
    atomic_store_explicit(&sync->done, 1, memory_order_release);
    return true;
}

static void serve_deferred(struct server *server) {
    while (server->deferred_count > 0) {
        serve_call(server, NULL, server->deferred[--server->deferred_count]);
    }
}

bool server_serve(struct server *server) {
    bool worked = false;
    server->depth++;
    atomic_store_explicit(&server->beat, atomic_load_explicit(&server->beat, memory_order_relaxed) + 1,
                          memory_order_relaxed);
    if (atomic_load_explicit(&server->starved, memory_order_relaxed)) {
        atomic_store_explicit(&server->starved, false, memory_order_relaxed);
    }
    worked |= serve_sync(server);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        worked |= serve_endpoint(server, server_endpoint(server, number));
    }
    worked |= serve_overflow(server);
    if (server->depth == 1 && server->deferred_count > 0) {
        serve_deferred(server);
        worked = true;
    }
    server->depth--;
    return worked;
}

/* Sleep. */

/* Looks once more, after it has said that it sleeps: what a client published before it saw that is seen. */
static bool is_wanted(struct server *server) {
    bool wanted = server->deferred_count > 0 ||
                  atomic_load_explicit(&server->sync.ready, memory_order_seq_cst) == SYNC_REQUEST ||
                  atomic_load_explicit(&server->parking, memory_order_seq_cst) == PARKING_REQUESTED ||
                  atomic_load_explicit(&server->stopping, memory_order_seq_cst) != 0 ||
                  atomic_load_explicit(&server->starved, memory_order_seq_cst) ||
                  atomic_load_explicit(&server->overflow, memory_order_seq_cst) != NULL;
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_seq_cst);
    for (unsigned i = 0; i < opened && !wanted; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        wanted = ring_filled(&server_endpoint(server, number)->ring, true) > 0;
    }
    return wanted;
}

static void sleep_for(struct server *server, uint64_t ns) {
    uint32_t rung = atomic_load_explicit(&server->bell, memory_order_seq_cst);
    atomic_store_explicit(&server->state, ns == 0 ? SERVER_SLEEPS : SERVER_NAPS, memory_order_seq_cst);
    if (!is_wanted(server)) {
        server->counts.naps++;
        futex_wait(&server->bell, rung, ns);
    }
    atomic_store_explicit(&server->state, SERVER_HOT, memory_order_seq_cst);
}

void server_wake(struct server *server) {
    /* One of those who come at once rings; it does after the others' stores, too, as far as those saw it
     * sleep. */
    if (atomic_load_explicit(&server->state, memory_order_seq_cst) != SERVER_HOT &&
        atomic_exchange_explicit(&server->state, SERVER_HOT, memory_order_seq_cst) != SERVER_HOT) {
        atomic_fetch_add_explicit(&server->bell, 1, memory_order_seq_cst);
        atomic_fetch_add_explicit(&server->wakes, 1, memory_order_relaxed);
        futex_wake_all(&server->bell);
    }
}

static bool is_crowded(const struct server *server) {
    return atomic_load_explicit(&server->crowded, memory_order_relaxed);
}

/* Whether others ran on its CPU while it never slept: by what it ran itself since the last look. */
static void look_for_crowd(struct server *server, uint64_t now) {
    if (is_crowded(server)) {
        if (now >= server->crowded_until_ns) {
            atomic_store_explicit(&server->crowded, false, memory_order_relaxed);
            server->looked_ns = 0;
        }
        return;
    }
    if (server->looked_ns != 0 && now - server->looked_ns < CROWD_LOOK_NS) {
        return;
    }
    uint64_t ran = clock_thread_ns();
    if (server->looked_ns != 0) {
        double share = (double)(ran - server->looked_ran_ns) / (double)(now - server->looked_ns);
        uint64_t most = server->crowded_ns * 2 < CROWDED_NS_MOST ? server->crowded_ns * 2 : CROWDED_NS_MOST;
        if (share < CROWD_SHARE) {
            server->crowded_ns = most < CROWDED_NS_LEAST ? CROWDED_NS_LEAST : most;
            server->crowded_until_ns = now + server->crowded_ns;
            server->counts.crowded++;
            atomic_store_explicit(&server->crowded, true, memory_order_relaxed);
        } else {
            server->crowded_ns /= 2;
        }
    }
    server->looked_ns = now;
    server->looked_ran_ns = ran;
}

static void look_at_window(struct server *server, uint64_t now) {
    if (now - server->window_ns < WINDOW_NS) {
        return;
    }
    server->window_ns = now;
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        unsigned number = atomic_load_explicit(&server->open[i], memory_order_relaxed);
        end_window(server, server_endpoint(server, number));
    }
    server->depth++; /* calls that run long work wait until this is done */
    server->idle = server->owner.tick(server->owner.context);
    server->depth--;
}

/* There is no work: looks around for a while, then naps, then sleeps. */
static void rest(struct server *server, uint64_t now) {
    if (server->hot_until_ns == 0) {
        server->hot_until_ns = now + (is_crowded(server) ? 0 : HOT_NS);
    }
    if (now < server->hot_until_ns) {
        for (int i = 0; i < 4; i++) {
            cpu_relax();
        }
        return;
    }
    server->looked_ns = 0; /* who sleeps is not crowded out */
    bool for_good = server->idle && server->nap_ns >= NAP_NS_MOST;
    sleep_for(server, for_good ? 0 : server->nap_ns);
    server->nap_ns = server->nap_ns * 2 < NAP_NS_MOST ? server->nap_ns * 2 : NAP_NS_MOST;
}

static void park(struct server *server) {
    uint32_t requested = PARKING_REQUESTED;
    if (!atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_PARKED,
                                                 memory_order_seq_cst, memory_order_relaxed)) {
        return;
    }
    futex_wake_all(&server->parking);
    while (atomic_load_explicit(&server->parking, memory_order_acquire) == PARKING_PARKED) {
        futex_wait(&server->parking, PARKING_PARKED, 0);
    }
    server->looked_ns = 0;
}

static void run(void *argument) {
    struct server *server = argument;
    server->started(server);
    for (unsigned pass = 0;; pass++) {
        /* Before the look around, which then sees all that was sent before. */
        bool stopping = atomic_load_explicit(&server->stopping, memory_order_acquire) != 0;
        bool worked = server_serve(server);
        worked |= feed(server);
        if (load(&server->parking) == PARKING_REQUESTED) {
            park(server);
        }
        if (worked) {
            server->hot_until_ns = 0;
            server->nap_ns = is_crowded(server) ? NAP_NS_CROWDED : NAP_NS_LEAST;
            server->idle = false;
            if (pass % PASSES_PER_CLOCK != 0) {
                continue;
            }
        }
        if (stopping && !worked) {
            break;
        }
        uint64_t now = clock_now_ns();
        look_at_window(server, now);
        look_for_crowd(server, now);
        if (!worked) {
            rest(server, now);
        }
    }
    server_withdraw_all(server);
    server->owner.release(server->owner.context);
    atomic_store_explicit(&server->phase, PHASE_DIRECT, memory_order_release);
    futex_wake_all((_Atomic(uint32_t) *)(void *)&server->phase);
}

/* Nobody ever was at the heap but the last process's server, which was parked: what it left in the rings, and
 * what others have sent since, is for this thread. */
static void go_without(struct server *server) {
    server_serve(server);
    server_withdraw_all(server);
    server->owner.release(server->owner.context);
    atomic_store_explicit(&server->phase, PHASE_DIRECT, memory_order_release);
}

void server_start(struct server *server) {
    /* Not while another thread forks, whose child would have a heap with the server in the midst of it. */
    lock_acquire(&server->fork_lock);
    if (atomic_load_explicit(&server->phase, memory_order_relaxed) == PHASE_NONE) {
        atomic_store_explicit(&server->phase, PHASE_RUNNING, memory_order_release);
        if (!thread_start(run, server, STACK_BYTES)) {
            go_without(server);
        }
    }
    lock_release(&server->fork_lock);
}

/* Whether the server did anything since beat. */
static bool is_alive(const struct server *server, uint64_t *beat) {
    uint64_t now = atomic_load_explicit(&server->beat, memory_order_relaxed);
    bool alive = now != *beat;
    *beat = now;
    return alive;
}

/* Waits until the word is not seen any more, for as long as the server shows that it lives. */
static bool wait_for_server(struct server *server, _Atomic(uint32_t) *word, uint32_t seen) {
    uint64_t beat = atomic_load_explicit(&server->beat, memory_order_relaxed);
    uint64_t start = clock_now_ns();
    while (atomic_load_explicit(word, memory_order_acquire) == seen) {
        if (is_alive(server, &beat)) {
            start = clock_now_ns();
        } else if (clock_now_ns() - start > PARK_PATIENCE_NS) {
            return false;
        }
        futex_wait(word, seen, STARVED_NS);
    }
    return true;
}

bool server_stop(struct server *server) {
    if (atomic_load_explicit(&server->phase, memory_order_acquire) != PHASE_RUNNING || server->left_behind) {
        return false;
    }
    atomic_store_explicit(&server->stopping, 1, memory_order_seq_cst);
    server_wake(server);
    return wait_for_server(server, (_Atomic(uint32_t) *)(void *)&server->phase, PHASE_RUNNING);
}

void server_before_fork(struct server *server) {
    lock_acquire(&server->fork_lock);
    lock_acquire(&server->open_lock);
    if (atomic_load_explicit(&server->phase, memory_order_acquire) == PHASE_RUNNING && !server->left_behind) {
        atomic_store_explicit(&server->parking, PARKING_REQUESTED, memory_order_seq_cst);
        server_wake(server);
        uint32_t requested = PARKING_REQUESTED;
        if (!wait_for_server(server, &server->parking, PARKING_REQUESTED) &&
            atomic_compare_exchange_strong_explicit(&server->parking, &requested, PARKING_NONE,
                                                    memory_order_seq_cst, memory_order_relaxed)) {
            /* It may be in the midst of anything. */
            server->left_behind = true;
        }
    }
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = 0; i < opened; i++) {
        lock_acquire(&server_endpoint(server, server->open[i])->lock);
    }
    lock_acquire(&server->sync.clients);
}

/* Nobody but the forked thread is there, and what others were at is at an end. */
static void start_over(struct server *server) {
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store_explicit(&server->calls[i].state, CALL_FREE, memory_order_relaxed);
    }
    atomic_store_explicit(&server->sync.ready, SYNC_NONE, memory_order_relaxed);
    atomic_store_explicit(&server->sync.done, 0, memory_order_relaxed);
    atomic_store_explicit(&server->state, SERVER_HOT, memory_order_relaxed);
    atomic_store_explicit(&server->crowded, false, memory_order_relaxed);
    atomic_store_explicit(&server->was_lost, false, memory_order_relaxed);
    server->deferred_count = 0;
    server->depth = 0;
    server->hot_until_ns = 0;
    server->looked_ns = 0;
    if (atomic_load_explicit(&server->phase, memory_order_relaxed) == PHASE_RUNNING && !server->left_behind) {
        atomic_store_explicit(&server->starved, false, memory_order_relaxed);
        atomic_store_explicit(&server->phase, PHASE_NONE, memory_order_relaxed);
    } else {
        atomic_store_explicit(&server->starved, server->left_behind, memory_order_relaxed);
    }
}

void server_after_fork(struct server *server, bool child) {
    lock_release(&server->sync.clients);
    unsigned opened = atomic_load_explicit(&server->opened, memory_order_acquire);
    for (unsigned i = opened; i-- > 0;) {
        lock_release(&server_endpoint(server, server->open[i])->lock);
    }
    if (child) {
        start_over(server);
    } else {
        server->left_behind = false;
    }
    if (load(&server->parking) == PARKING_PARKED) {
        atomic_store_explicit(&server->parking, PARKING_NONE, memory_order_release);
        futex_wake_all(&server->parking);
    }
    lock_release(&server->open_lock);
    lock_release(&server->fork_lock);
}
