/*
 * The server and its clients, on a fake heap, which counts its blocks, and may be used by its owner only or,
 * in shared mode, by any thread that holds its lock. Whether server and clients are late, asleep, full, in
 * shared mode, forked or gone, each block is handed out once and returned once. Each test runs in a separate
 * process.
 */
#include "offload/server.h"

#include <pthread.h>
#include <sched.h>
#include <string.h>
#include <sys/syscall.h>

#include "check.h"
#include "lost_lock.h"
#include "offload/client.h"
#include "offload/heap_mode.h"
#include "offload/lifecycle.h"
#include "offload/prefill.h"
#include "offload/serve.h"
#include "offload/sync.h"
#include "os/clock.h"
#include "os/futex.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/thread.h"
#include "os/vm.h"
#include "test_clock.h"

#define MAGAZINES   20 /* of each class that there are blocks for */
#define MORE_BLOCKS 9000
#define LARGE       64
#define THREADS     6
#define HELD        6
#define AGAIN       100
#define TIMEOUT_NS  600000000000ULL
/* Of clients that are to lose the server. */
#define SHORT_TIMEOUT_NS 10000000ULL

static struct size_classes classes;
static struct server server;
static unsigned rounds = 1500;
static uint64_t seed;
static size_t spare_bytes; /* 0, where what is freed is to come to the server */

/* On the server, whose thread the C library does not know. */
#define SERVER_CHECK(condition) ((condition) ? (void)0 : fail(#condition, __LINE__))

static void fail(const char *condition, unsigned line) {
    text_write_line(2, __FILE__ ":%u, on the server: %s", line, condition);
    os_syscall(SYS_exit_group, 1, 0, 0, 0, 0, 0);
}

static _Atomic(bool) time_flies;
static pthread_t ticker;

static void *run_ticker(void *unused) {
    while (atomic_load(&time_flies)) {
        clock_advance(2 * CLOCK_MS);
        check_nap(100000);
    }
    return unused;
}

/* For a test in which time must pass until something happens: it does, as fast as it can. */
static void let_time_fly(void) {
    clock_stop();
    atomic_store(&time_flies, true);
    CHECK(pthread_create(&ticker, NULL, run_ticker, NULL) == 0);
}

static void let_time_stand(void) {
    atomic_store(&time_flies, false);
    CHECK(pthread_join(ticker, NULL) == 0);
}

static bool after_ms(uint64_t ms, bool is_so) {
    clock_advance(is_so ? 0 : ms * CLOCK_MS);
    return is_so;
}

/* The same where time passes only while this waits. The clock is stopped. */
#define PASS_TIME_UNTIL(condition) WAIT_UNTIL(after_ms(10, (condition)))

/* ---- a door that the server may stand before ---- */

struct gate {
    _Atomic(uint32_t) closed;
    _Atomic(uint32_t) waiting;
};

static void gate_pass(struct gate *gate) {
    while (atomic_load(&gate->closed) != 0) {
        atomic_store(&gate->waiting, 1);
        futex_wait(&gate->closed, 1, 0);
    }
    atomic_store(&gate->waiting, 0);
}

static void gate_close(struct gate *gate) {
    atomic_store(&gate->closed, 1);
}

static void gate_open(struct gate *gate) {
    atomic_store(&gate->closed, 0);
    futex_wake_all(&gate->closed);
}

/* ---- the heap ---- */

enum held { NOBODYS, HELD_BY = 1, GIVEN_BY = 2 };

struct block {
    uint32_t class;
    uint32_t pages;
    struct block *next; /* free */
    bool out;
    _Atomic(uint32_t) held; /* client * 4 + enum held */
    uint64_t mark;          /* the holder's, plain: ThreadSanitizer sees whether it is handed over */
};

static struct {
    struct block *free[SIZE_CLASSES];
    struct block *blocks;
    size_t count;
    size_t out;
    uint64_t operations;
    bool shared; /* plain, as what a heap's owner is: ThreadSanitizer sees whether it is handed over */
    struct lock lock;
    unsigned lendings[SHARED_FOR_GOOD + 1];
    unsigned takings;
    uint64_t works;
    bool serving; /* between two pieces */
    uint64_t random;
} heap;

static struct gate at_take;
static _Atomic(long) owner_thread; /* while the heap is not shared: who alone may be in it */
static _Atomic(int) sharers;
static _Atomic(unsigned) settled;
static _Atomic(unsigned) losts;
static _Atomic(bool) tidy; /* what a tick says */
static _Atomic(unsigned) ticks;
static void (*on_tick)(void);
static bool serves_between;
static bool watches_prefilled;
static _Atomic(bool) refuses_threads;
static _Atomic(bool) crowded;          /* what the server is told, of others on its CPU */
static _Atomic(unsigned) told_crowded; /* so often */
static _Atomic(bool) has_room;         /* and of a CPU that is idle */

bool __real_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);
bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes);

bool __wrap_thread_start(struct thread *thread, void (*body)(void *argument), void *argument,
                         size_t stack_bytes) {
    return !atomic_load(&refuses_threads) && __real_thread_start(thread, body, argument, stack_bytes);
}

bool __wrap_contention_check(struct contention *contention, uint64_t now_ns);
bool __wrap_contention_is_over(struct contention *contention, uint64_t now_ns);

bool __wrap_contention_check(struct contention *contention, uint64_t now_ns) {
    (void)contention, (void)now_ns;
    bool is_there = atomic_load(&crowded);
    atomic_fetch_add(&told_crowded, is_there);
    return is_there;
}

bool __wrap_contention_is_over(struct contention *contention, uint64_t now_ns) {
    (void)contention, (void)now_ns;
    return atomic_load(&has_room);
}

static long this_thread(void) {
    return os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
}

static size_t class_charge(uint32_t class) {
    size_t size = classes.of[class].size;
    return (size < MIN_PREFILL_CHARGE ? MIN_PREFILL_CHARGE : size) * classes.of[class].batch;
}

/* What lies ready at an endpoint but for the first magazine of each class, which may always be there; by the
 * server's own thread: clients may only take of it meanwhile. */
static size_t stock_charge(struct endpoint *endpoint) {
    size_t charge = 0;
    for (uint32_t class = 1; class < classes.count; ++class) {
        uint32_t level = atomic_load(&endpoint->put[class]) - atomic_load(&endpoint->taken[class]);
        SERVER_CHECK(level <= MAX_PREFILLED_MAGAZINES && level <= server.layout.queues[class].max_ready);
        charge += (level > 0 ? level - 1 : 0) * class_charge(class);
    }
    for (uint32_t queue = SIZE_CLASSES; queue < QUEUES; queue++) {
        uint32_t level = atomic_load(&endpoint->put[queue]) - atomic_load(&endpoint->taken[queue]);
        SERVER_CHECK(level <= LARGE_QUEUE_BLOCKS);
        charge += level * atomic_load(&endpoint->large_pages[queue - SIZE_CLASSES]) * vm_page_size();
    }
    return charge;
}

static void check_prefilled(void) {
    for (struct endpoint *endpoint = server_endpoints(&server); endpoint != NULL; endpoint = endpoint->next) {
        SERVER_CHECK(stock_charge(endpoint) <= MAX_PREFILL_BYTES);
    }
}

/* What tells that there are sharers orders nothing, so that what should does. */
static bool has_sharers(void) {
    return atomic_load_explicit(&sharers, memory_order_relaxed) != 0;
}

static void enter(void) {
    if (heap.shared) {
        lock_acquire(&heap.lock);
    } else {
        SERVER_CHECK(this_thread() == atomic_load_explicit(&owner_thread, memory_order_relaxed));
        SERVER_CHECK(!has_sharers());
        if (watches_prefilled) {
            check_prefilled();
        }
    }
    heap.operations++;
}

/* As a purge would. */
static void leave(void) {
    if (heap.shared) {
        lock_release(&heap.lock);
        return;
    }
    if (serves_between && !heap.serving && check_random(&heap.random) % 8 == 0) {
        heap.serving = true;
        server_serve_between(&server);
        heap.serving = false;
    }
    SERVER_CHECK(!heap.shared && !has_sharers());
}

static struct block *pop(uint32_t class) {
    struct block *block = heap.free[class];
    if (block != NULL) {
        SERVER_CHECK(!block->out);
        heap.free[class] = block->next;
        block->out = true;
        heap.out++;
    }
    return block;
}

static void push(struct block *block) {
    SERVER_CHECK(block->out);
    SERVER_CHECK(atomic_load(&block->held) % 4 != HELD_BY);
    block->out = false;
    block->next = heap.free[block->class];
    heap.free[block->class] = block;
    heap.out--;
}

static size_t take(uint32_t class, void **blocks, size_t count) {
    SERVER_CHECK(class > 0 && class < classes.count && count <= MAX_MAGAZINE_BLOCKS);
    enter();
    size_t taken = 0;
    while (taken < count && heap.free[class] != NULL) {
        blocks[taken++] = pop(class);
    }
    gate_pass(&at_take);
    leave();
    return taken;
}

static void put(uint32_t class, void *const *blocks, size_t count) {
    SERVER_CHECK(count > 0 && count <= MAX_MAGAZINE_BLOCKS);
    enter();
    for (size_t i = 0; i < count; i++) {
        struct block *block = blocks[i];
        SERVER_CHECK(block->class == class);
        push(block);
    }
    leave();
}

static void *take_large(size_t pages, size_t align_pages, bool *zero) {
    SERVER_CHECK(align_pages > 0);
    enter();
    struct block *block = pop(0);
    if (block != NULL) {
        block->pages = (uint32_t)pages;
    }
    *zero = pages % 2 == 0;
    gate_pass(&at_take);
    leave();
    return block;
}

static void put_large(void *block) {
    SERVER_CHECK(((struct block *)block)->class == 0);
    enter();
    push(block);
    leave();
}

static void take_for(void *context, struct request *request, bool at_once) {
    (void)at_once;
    SERVER_CHECK(context == &heap && request->kind == REQUEST_TAKE);
    if (request->class != 0) {
        request->count = take(request->class, request->blocks, request->count);
    } else {
        SERVER_CHECK(request->count == 1);
        request->blocks[0] = take_large(request->pages, request->align_pages, &request->zero);
        request->count = request->blocks[0] != NULL;
    }
}

static void put_for(void *context, uint32_t class, void *const *blocks, size_t count) {
    SERVER_CHECK(context == &heap);
    if (class != 0) {
        put(class, blocks, count);
    } else {
        SERVER_CHECK(count == 1);
        put_large(blocks[0]);
    }
}

static uint32_t class_of(void *context, const void *block) {
    SERVER_CHECK(context == &heap && ((const struct block *)block)->out);
    return ((const struct block *)block)->class;
}

static bool tick(void *context) {
    SERVER_CHECK(context == &heap);
    enter();
    atomic_fetch_add(&ticks, 1);
    leave();
    if (on_tick != NULL) {
        on_tick();
    }
    return atomic_load(&tidy);
}

/* Nothing is under way then: all of it would be out of the sharers' reach. */
static void check_nothing_sent(void) {
    size_t bytes;
    SERVER_CHECK(prefill_blocks(&server, &bytes) == 0 && bytes == 0);
    for (struct endpoint *endpoint = server_endpoints(&server); endpoint != NULL; endpoint = endpoint->next) {
        const struct ring *ring = &endpoint->ring;
        SERVER_CHECK(atomic_load(&ring->head) == atomic_load(&ring->tail));
    }
}

/* Nor is anything expected, which would be made ready again once the heap is taken back. */
static void check_nothing_expected(void) {
    for (struct endpoint *endpoint = server_endpoints(&server); endpoint != NULL; endpoint = endpoint->next) {
        for (uint32_t queue = 1; queue < QUEUES; queue++) {
            SERVER_CHECK(endpoint->predictors[queue].target == 0);
        }
    }
}

static void lend(void *context, enum governor_mode lending) {
    SERVER_CHECK(context == &heap && !has_sharers());
    SERVER_CHECK(heap.shared || this_thread() == atomic_load(&owner_thread));
    check_nothing_sent();
    check_nothing_expected();
    heap.lendings[lending]++;
    heap.shared = true;
}

static void take_back(void *context) {
    SERVER_CHECK(context == &heap && heap.shared && !has_sharers());
    heap.takings++;
    heap.shared = false;
    atomic_store_explicit(&owner_thread, this_thread(), memory_order_relaxed);
}

static void settle(void *context) {
    SERVER_CHECK(context == &heap);
    atomic_fetch_add(&settled, 1);
}

static void lost(void *context) {
    CHECK(context == &heap);
    atomic_fetch_add(&losts, 1);
}

static size_t blocks_of(uint32_t class) {
    return class == 0 ? LARGE : (size_t)MAGAZINES * classes.of[class].batch + (class == 1 ? MORE_BLOCKS : 0);
}

static void set_up(unsigned endpoints) {
    for (uint32_t class = 0; class < classes.count; ++class) {
        heap.count += blocks_of(class);
    }
    heap.blocks = calloc(heap.count, sizeof *heap.blocks);
    CHECK(heap.blocks != NULL);
    size_t next = 0;
    for (uint32_t class = 0; class < classes.count; ++class) {
        for (size_t i = 0; i < blocks_of(class); i++) {
            struct block *block = &heap.blocks[next++];
            block->class = class;
            block->next = heap.free[class];
            heap.free[class] = block;
        }
    }
    heap.random = seed * 88172645463325252U;
    server.hooks = (struct server_hooks){
        .context = &heap,
        .take = take_for,
        .put = put_for,
        .class_of = class_of,
        .tick = tick,
        .switch_to_shared = lend,
        .switch_to_exclusive = take_back,
    };
    server.layout.classes = &classes;
    server.hooks.choose_cpu = settle;
    server.hooks.report_unresponsive = lost;
    server.always_exclusive = true; /* where nothing else is said: whatever else the machine does */
    server.timeout_ns = SHORT_TIMEOUT_NS;
    server.contention.cpus = 2;
    /* The thread that begins shared mode is alone with the heap until then. */
    atomic_store(&owner_thread, this_thread());
    CHECK(server_init(&server, endpoints, spare_bytes));
}

static bool is_running(void) {
    return atomic_load(&server.heap_mode) == HEAP_MODE_EXCLUSIVE;
}

/* The server has the heap. */
static void launch(void) {
    heap_mode_begin(&server);
    server_start(&server);
    WAIT_UNTIL(is_running());
}

static void set_up_running(unsigned endpoints) {
    set_up(endpoints);
    launch();
}

/* ---- clients ---- */

struct taken_magazine {
    uint32_t class;
    size_t count;
    void *blocks[MAX_MAGAZINE_BLOCKS];
};

struct client {
    pthread_t thread;
    uint32_t number; /* from 1 on */
    uint64_t random;
    struct taken_magazine held[HELD];
    void *large[HELD];
    uint64_t done;
    uint64_t lost;
};

static struct client clients[THREADS];
static struct client me = {.number = THREADS + 1, .random = 4711};
static _Atomic(bool) stop;

static void hold(const struct client *client, struct block *block) {
    /* Who gave it may not have noted that it is given. */
    CHECK(atomic_exchange(&block->held, client->number * 4 + HELD_BY) % 4 != HELD_BY);
    block->mark = client->number;
}

static void give(const struct client *client, struct block *block) {
    CHECK_EQUAL(block->mark, client->number);
    CHECK_EQUAL(atomic_exchange(&block->held, client->number * 4 + GIVEN_BY), client->number * 4 + HELD_BY);
}

static void given(const struct client *client, struct block *block) {
    uint32_t mine = client->number * 4 + GIVEN_BY;
    atomic_compare_exchange_strong(&block->held, &mine, NOBODYS);
}

static void hold_all(const struct client *client, const struct taken_magazine *magazine) {
    for (size_t i = 0; i < magazine->count; i++) {
        struct block *block = magazine->blocks[i];
        CHECK_EQUAL(block->class, magazine->class);
        hold(client, block);
    }
}

/* ---- what clients ask for ---- */

static enum answer ask_take(unsigned number, uint32_t class, void **blocks, size_t count, size_t *got) {
    struct request request = request_for(REQUEST_TAKE, NULL, class, blocks, count);
    enum answer answer = client_ask(&server, number, &request);
    *got = answer == ANSWER_DONE ? request.count : 0;
    return answer;
}

static bool ask_put(unsigned number, uint32_t class, void **blocks, size_t count) {
    struct request request = request_for(REQUEST_PUT, NULL, class, blocks, count);
    enum answer answer = client_ask(&server, number, &request);
    CHECK(answer != ANSWER_UNRESPONSIVE);
    return answer == ANSWER_DONE;
}

static enum answer ask_take_large(unsigned number, size_t pages, size_t align_pages, void **block,
                                  bool *zero) {
    struct request request = {
        .kind = REQUEST_TAKE, .blocks = block, .count = 1, .pages = pages, .align_pages = align_pages};
    *block = NULL;
    enum answer answer = client_ask(&server, number, &request);
    CHECK(answer != ANSWER_DONE || request.count == (*block != NULL));
    *zero = request.zero;
    return answer;
}

static bool ask_put_large(unsigned number, void *block, size_t bytes) {
    struct request request = {.kind = REQUEST_PUT, .blocks = &block, .count = 1, .bytes = bytes};
    enum answer answer = client_ask(&server, number, &request);
    CHECK(answer != ANSWER_UNRESPONSIVE);
    return answer == ANSWER_DONE;
}

static enum answer ask_run(unsigned number, enum request_kind kind, void (*work)(void *subject),
                           void *subject) {
    struct request request = {.kind = kind, .work = work, .subject = subject};
    return client_ask(&server, number, &request);
}

static enum answer ask_take_sync(uint32_t class, void **block) {
    struct request request = request_for(REQUEST_TAKE, NULL, class, block, 1);
    *block = NULL;
    enum answer answer = client_ask_sync(&server, &request);
    CHECK(answer != ANSWER_DONE || request.count == (*block != NULL));
    return answer;
}

static enum answer ask_put_sync(uint32_t class, void *block) {
    struct request request = request_for(REQUEST_PUT, NULL, class, &block, 1);
    return client_ask_sync(&server, &request);
}

/* As the allocator's door does: with the server, or at the heap while it is shared. False if that is over. */
static bool at_lent_heap(unsigned number, void (*work)(void *subject), void *subject) {
    struct endpoint *shared = client_enter_shared(&server, number);
    if (shared == NULL) {
        return false;
    }
    atomic_fetch_add_explicit(&sharers, 1, memory_order_relaxed);
    CHECK(heap.shared);
    work(subject);
    CHECK(heap.shared);
    atomic_fetch_sub_explicit(&sharers, 1, memory_order_relaxed);
    client_leave_shared(shared);
    return true;
}

static void take_lent(void *subject) {
    struct taken_magazine *magazine = subject;
    magazine->count = take(magazine->class, magazine->blocks, classes.of[magazine->class].batch);
}

static void put_lent(void *subject) {
    const struct taken_magazine *magazine = subject;
    put(magazine->class, magazine->blocks, magazine->count);
}

static enum answer take_magazine(struct client *client, unsigned number, uint32_t class,
                                 struct taken_magazine *magazine) {
    size_t batch = classes.of[class].batch;
    magazine->class = class;
    enum answer answer;
    do {
        answer = ask_take(number, class, magazine->blocks, batch, &magazine->count);
        CHECK(magazine->count <= batch);
        CHECK(answer == ANSWER_DONE || magazine->count == 0);
    } while (answer == ANSWER_SHARED && !at_lent_heap(number, take_lent, magazine));
    hold_all(client, magazine);
    return answer == ANSWER_SHARED ? ANSWER_DONE : answer;
}

static void put_magazine(struct client *client, unsigned number, struct taken_magazine *magazine) {
    for (size_t i = 0; i < magazine->count; i++) {
        give(client, magazine->blocks[i]);
    }
    while (!ask_put(number, magazine->class, magazine->blocks, magazine->count) &&
           !at_lent_heap(number, put_lent, magazine)) {
    }
    for (size_t i = 0; i < magazine->count; i++) {
        given(client, magazine->blocks[i]);
    }
    magazine->count = 0;
}

struct large {
    void *block;
    size_t pages;
    size_t align;
    bool zero;
};

static void take_large_lent(void *subject) {
    struct large *large = subject;
    large->block = take_large(large->pages, large->align, &large->zero);
}

static void put_large_lent(void *block) {
    put_large(block);
}

static enum answer take_one_large(struct client *client, unsigned number, size_t pages, size_t align,
                                  void **block) {
    struct large large = {NULL, pages, align, false};
    enum answer answer;
    do {
        answer = ask_take_large(number, pages, align, &large.block, &large.zero);
        CHECK(answer == ANSWER_DONE || large.block == NULL);
    } while (answer == ANSWER_SHARED && !at_lent_heap(number, take_large_lent, &large));
    *block = large.block;
    if (large.block != NULL) {
        CHECK_EQUAL(((const struct block *)large.block)->pages, pages);
        CHECK_EQUAL(large.zero, pages % 2 == 0);
        hold(client, large.block);
    }
    return answer == ANSWER_SHARED ? ANSWER_DONE : answer;
}

static void put_one_large(struct client *client, unsigned number, void **large) {
    give(client, *large);
    size_t bytes = ((struct block *)*large)->pages * vm_page_size();
    while (!ask_put_large(number, *large, bytes) && !at_lent_heap(number, put_large_lent, *large)) {
    }
    given(client, *large);
    *large = NULL;
}

static enum answer run_at_heap(unsigned number, enum request_kind kind, void (*work)(void *subject),
                               void *subject) {
    enum answer answer;
    do {
        answer = ask_run(number, kind, work, subject);
    } while (answer == ANSWER_SHARED && !at_lent_heap(number, work, subject));
    return answer == ANSWER_SHARED ? ANSWER_DONE : answer;
}

struct one {
    uint32_t class;
    void *block;
};

static void take_one_lent(void *subject) {
    struct one *one = subject;
    if (take(one->class, &one->block, 1) == 0) {
        one->block = NULL;
    }
}

static void put_one_lent(void *subject) {
    struct one *one = subject;
    put(one->class, &one->block, 1);
}

static enum answer take_sync(unsigned number, struct one *one) {
    enum answer answer;
    do {
        answer = ask_take_sync(one->class, &one->block);
    } while (answer == ANSWER_SHARED && !at_lent_heap(number, take_one_lent, one));
    return answer == ANSWER_SHARED ? ANSWER_DONE : answer;
}

static enum answer put_sync(unsigned number, struct one *one) {
    enum answer answer;
    do {
        answer = ask_put_sync(one->class, one->block);
    } while (answer == ANSWER_SHARED && !at_lent_heap(number, put_one_lent, one));
    return answer == ANSWER_SHARED ? ANSWER_DONE : answer;
}

struct work {
    unsigned ran;
    uint64_t works;
};

static void do_work(void *subject) {
    struct work *work = subject;
    enter();
    work->ran++;
    work->works = ++heap.works;
    leave();
}

static void note(struct client *client, enum answer answer) {
    CHECK(answer != ANSWER_SHARED);
    client->done += answer == ANSWER_DONE;
    client->lost += answer == ANSWER_UNRESPONSIVE;
    if (answer == ANSWER_UNRESPONSIVE) {
        check_nap(100000);
    }
}

static void step(struct client *client) {
    unsigned number = (unsigned)check_random(&client->random);
    struct taken_magazine *magazine = &client->held[number % HELD];
    void **large = &client->large[number % HELD];
    switch (check_random(&client->random) % 8) {
    case 0:
        if (*large == NULL) {
            note(client, take_one_large(client, number, 1 + check_random(&client->random) % 5,
                                        check_random(&client->random) % 4 == 0 ? 2 : 1, large));
        } else {
            put_one_large(client, number, large);
        }
        break;
    case 1: {
        struct work work = {0};
        enum request_kind kind = check_random(&client->random) % 4 == 0 ? REQUEST_RUN_LONG : REQUEST_RUN;
        enum answer answer = run_at_heap(number, kind, do_work, &work);
        note(client, answer);
        CHECK_EQUAL(work.ran, answer == ANSWER_DONE);
        break;
    }
    default:
        if (magazine->count == 0) {
            uint32_t class = 1 + (uint32_t)(check_random(&client->random) % 40 * 7 % (classes.count - 1));
            note(client, take_magazine(client, number, class, magazine));
        } else {
            put_magazine(client, number, magazine);
        }
    }
}

static void put_everything(struct client *client) {
    for (unsigned i = 0; i < HELD; i++) {
        if (client->held[i].count > 0) {
            put_magazine(client, i, &client->held[i]);
        }
        if (client->large[i] != NULL) {
            put_one_large(client, i, &client->large[i]);
        }
    }
}

static void *run_client(void *argument) {
    struct client *client = argument;
    for (unsigned round = 0; round < rounds || client->done == 0; round++) {
        step(client);
    }
    put_everything(client);
    return NULL;
}

static void start_clients(void *(*body)(void *argument)) {
    for (uint32_t i = 0; i < THREADS; i++) {
        clients[i].number = i + 1;
        clients[i].random = (i + seed) * 2654435761U;
        CHECK(pthread_create(&clients[i].thread, NULL, body, &clients[i]) == 0);
    }
}

static void join_clients(void) {
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(clients[i].thread, NULL) == 0);
    }
}

/* As often as the machine keeps the server from its work. */
static void have_run(enum request_kind kind, void (*work)(void *subject), void *subject) {
    enum answer answer;
    WAIT_UNTIL((answer = run_at_heap(0, kind, work, subject)) != ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(answer, ANSWER_DONE);
}

static void have_taken(uint32_t class, struct taken_magazine *magazine) {
    enum answer answer;
    WAIT_UNTIL((answer = take_magazine(&me, 0, class, magazine)) != ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(answer, ANSWER_DONE);
    CHECK_EQUAL(magazine->count, classes.of[class].batch);
}

static void copy_out(void *subject) {
    enter();
    *(size_t *)subject = heap.out;
    leave();
}

/* Blocks that are not in the heap. */
static size_t blocks_out(void) {
    size_t out;
    have_run(REQUEST_RUN, copy_out, &out);
    return out;
}

static void copy_counts(void *subject) {
    *(struct server_counts *)subject = server.counts; /* of a server that runs */
}

static struct server_counts counts_now(void) {
    struct server_counts counts;
    have_run(REQUEST_RUN, copy_counts, &counts);
    return counts;
}

static uint64_t stocked_now(void) {
    struct server_counts counts = counts_now();
    return counts.prefilled;
}

/* ---- the end ---- */

static void stop_server(void) {
    /* Who interrupted the holder of what others wait for asks, and does not wait. */
    lock_acquire(&server.fork_lock);
    CHECK(!server_stop(&server, UINT64_MAX));
    lock_release(&server.fork_lock);
    WAIT_UNTIL(server_stop(&server, server_long_timeout_ns(&server)));
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_SHARED);
    CHECK_EQUAL(atomic_load(&server.thread), THREAD_REFUSED);
    CHECK_EQUAL(heap.lendings[SHARED_FOR_GOOD], 1);
    CHECK(server_stop(&server, server_long_timeout_ns(&server)));
}

static void check_slots_free(void) {
    for (size_t i = 0; i < CALLS; i++) {
        CHECK_EQUAL(atomic_load(&server.calls[i].state), CALL_FREE);
    }
}

static void check_all_back(void) {
    CHECK_EQUAL(heap.out, 0);
    for (size_t i = 0; i < heap.count; i++) {
        CHECK(!heap.blocks[i].out);
        CHECK(atomic_load(&heap.blocks[i].held) == NOBODYS);
    }
    check_slots_free();
    CHECK(overflow_is_empty(&server.overflow));
}

/* Nobody is asked any more, and nothing done that was not asked for. */
static void check_lent(void) {
    struct taken_magazine magazine = {.class = 1};
    void *large;
    bool zero;
    struct work work = {0};
    CHECK_EQUAL(ask_take(0, 1, magazine.blocks, 1, &magazine.count), ANSWER_SHARED);
    CHECK_EQUAL(ask_take_large(0, 1, 1, &large, &zero), ANSWER_SHARED);
    CHECK(large == NULL);
    CHECK_EQUAL(ask_run(0, REQUEST_RUN, do_work, &work), ANSWER_SHARED);
    CHECK_EQUAL(ask_run(0, REQUEST_RUN_LONG, do_work, &work), ANSWER_SHARED);
    CHECK_EQUAL(work.ran, 0);
    void *block = NULL;
    CHECK_EQUAL(ask_take_sync(1, &block), ANSWER_SHARED);
    CHECK(block == NULL);
    CHECK(at_lent_heap(0, take_lent, &magazine));
    CHECK_EQUAL(magazine.count, classes.of[1].batch);
    CHECK_EQUAL(ask_put_sync(1, magazine.blocks[0]), ANSWER_SHARED);
    CHECK(!ask_put(0, 1, magazine.blocks, magazine.count));
    CHECK(at_lent_heap(0, put_lent, &magazine));
}

static void finish(void) {
    stop_server();
    check_all_back();
    check_lent();
}

/* ---- many clients ---- */

static void test_many_clients(void) {
    set_up(3);
    serves_between = true;
    watches_prefilled = true;
    launch();
    start_clients(run_client);
    join_clients();
    uint64_t done = 0;
    for (uint32_t i = 0; i < THREADS; i++) {
        done += clients[i].done;
    }
    CHECK(done > 0);
    CHECK_EQUAL(atomic_load(&settled), 1);
    struct endpoint_sums counts = client_counts(&server);
    CHECK(counts.misses > 0);
    finish();
    CHECK(server.counts.records > 0 && server.counts.calls > 0 && server.counts.prefilled > 0);
    printf("%llu served, %llu hits, %llu misses, %llu losses\n", (unsigned long long)done,
           (unsigned long long)counts.hits, (unsigned long long)counts.misses,
           (unsigned long long)atomic_load(&server.unresponsive));
}

/* A heap that has not enough: who asks gets what there is, or nothing, and it is not a loss. */
static void test_short_of_memory(void) {
    set_up(1);
    const uint32_t class = 11;
    size_t batch = classes.of[class].batch;
    CHECK(batch > 1); /* what is left at last is no magazine, to be made ready */
    while (blocks_of(class) - heap.out > batch + 1) {
        hold(&me, pop(class));
    }
    launch();
    struct taken_magazine first;
    struct taken_magazine second;
    struct taken_magazine third;
    have_taken(class, &first);
    WAIT_UNTIL(take_magazine(&me, 0, class, &second) == ANSWER_DONE);
    CHECK_EQUAL(second.count, 1);
    WAIT_UNTIL(take_magazine(&me, 0, class, &third) == ANSWER_DONE);
    CHECK_EQUAL(third.count, 0);
    void *large[LARGE];
    for (size_t i = 0; i < LARGE; i++) {
        WAIT_UNTIL(take_one_large(&me, 0, 1000, 1, &large[i]) == ANSWER_DONE);
        CHECK(large[i] != NULL);
    }
    void *none;
    WAIT_UNTIL(take_one_large(&me, 0, 1000, 1, &none) == ANSWER_DONE);
    CHECK(none == NULL);
    for (size_t i = 0; i < LARGE; i++) {
        put_one_large(&me, 0, &large[i]);
    }
    put_magazine(&me, 0, &first);
    put_magazine(&me, 0, &second);
    for (size_t i = 0; i < heap.count; i++) {
        struct block *block = &heap.blocks[i];
        if (atomic_load(&block->held) != NOBODYS) {
            void *one = block;
            give(&me, block);
            ask_put(0, class, &one, 1);
            given(&me, block);
        }
    }
    finish();
}

/* ---- prefill queues ---- */

static void withdraw(void *subject) {
    (void)subject;
    enter();
    prefill_withdraw_all(&server);
    size_t bytes;
    SERVER_CHECK(prefill_blocks(&server, &bytes) == 0 && bytes == 0);
    leave();
}

/* More is wanted than may lie ready: of each class as much as there may be, and of all together, too. */
static void test_stock_bounds(void) {
    set_up(1);
    watches_prefilled = true;
    launch();
    static struct taken_magazine taken[SIZE_CLASSES];
    for (int turn = 0; turn < 5; turn++) {
        for (uint32_t class = classes.count - 1; class > 0; --class) {
            have_taken(class, &taken[class]);
            put_magazine(&me, 0, &taken[class]);
        }
        for (size_t pages = 1; pages < 8; pages++) {
            void *large[3];
            for (int i = 0; i < 3; i++) {
                WAIT_UNTIL(take_one_large(&me, 0, pages, 1, &large[i]) == ANSWER_DONE);
            }
            for (int i = 0; i < 3; i++) {
                put_one_large(&me, 0, &large[i]);
            }
        }
    }
    size_t most_bytes;
    size_t most = prefill_max_blocks(&server, &most_bytes);
    size_t firsts = 0;
    for (uint32_t class = 1; class < classes.count; ++class) {
        firsts += (size_t)classes.of[class].size * classes.of[class].batch;
    }
    CHECK_EQUAL(most_bytes, MAX_PREFILL_BYTES + firsts);
    size_t bytes;
    CHECK(prefill_blocks(&server, &bytes) <= most);
    CHECK(bytes <= most_bytes);
    CHECK(stocked_now() > 0);
    have_run(REQUEST_RUN_LONG, withdraw, NULL);
    CHECK_EQUAL(prefill_blocks(&server, &bytes), 0);
    finish();
}

/* One that is taken over and over is ready: then it is taken without a call. */
static void test_stock_serves(void) {
    set_up_running(1);
    struct taken_magazine magazine;
    bool served = false;
    for (double end = check_seconds() + TIMEOUT_S; !served;) {
        uint64_t hits = client_counts(&server).hits;
        have_taken(5, &magazine);
        put_magazine(&me, 0, &magazine);
        served = client_counts(&server).hits > hits;
        CHECK(check_seconds() < end);
    }
    finish();
}

/* What nobody takes any more goes back by itself. */
static void test_withdrawal(void) {
    clock_stop();
    set_up_running(2);
    struct taken_magazine magazine;
    size_t bytes;
    void *large;
    WAIT_UNTIL(take_one_large(&me, 0, 3, 1, &large) == ANSWER_DONE);
    have_taken(9, &magazine);
    WAIT_UNTIL(stocked_now() > 0);
    CHECK(prefill_blocks(&server, &bytes) > 0);
    PASS_TIME_UNTIL(prefill_blocks(&server, &bytes) == 0 && blocks_out() == magazine.count + 1);
    CHECK_EQUAL(bytes, 0);
    struct server_counts counts = counts_now();
    CHECK_EQUAL(counts.prefill_unused + client_counts(&server).hits, counts.prefilled);
    put_magazine(&me, 0, &magazine);
    put_one_large(&me, 0, &large);
    finish();
}

/* What is freed and wanted again goes to no server; what is not wanted does, by itself. */
static void test_spares(void) {
    clock_stop();
    set_up_running(1);
    struct taken_magazine magazine;
    have_taken(9, &magazine);
    struct server_counts before = counts_now();
    for (unsigned again = 0; again < AGAIN; again++) {
        put_magazine(&me, 0, &magazine);
        have_taken(9, &magazine);
    }
    struct server_counts after = counts_now();
    CHECK_EQUAL(after.records - before.records, 1); /* the call that counts them */
    put_magazine(&me, 0, &magazine);
    size_t bytes;
    CHECK(prefill_blocks(&server, &bytes) > 0);
    PASS_TIME_UNTIL(prefill_blocks(&server, &bytes) == 0 && blocks_out() == 0);
    CHECK_EQUAL(bytes, 0);
    finish();
}

/* ---- a server that sleeps, or is kept ---- */

/* For good: its sleeps end by themselves. The clock is stopped. */
static void wait_until_asleep(void) {
    atomic_store(&tidy, true);
    PASS_TIME_UNTIL(clock_sleep_of(&server.wakeup) == ASLEEP_FOR_GOOD);
    CHECK_EQUAL(atomic_load(&server.state), SERVER_SLEEPS);
}

static bool after_half_a_ms(bool is_so) {
    clock_advance(is_so ? 0 : CLOCK_MS / 2);
    return is_so;
}

/* A server that sleeps for good leaves no prefilled blocks behind: no later epoch would return it. Time moves
 * in steps shorter than most of its sleeps, so that as few epochs as possible end before it sleeps. */
static void test_sleep_leaves_nothing_ready(void) {
    clock_stop();
    set_up_running(1);
    atomic_store(&tidy, true);
    struct taken_magazine magazine;
    struct taken_magazine kept;
    void *large;
    WAIT_UNTIL(take_one_large(&me, 0, 3, 1, &large) == ANSWER_DONE);
    have_taken(9, &magazine);
    have_taken(8, &kept);
    put_magazine(&me, 0, &magazine);
    WAIT_UNTIL(stocked_now() > 0);
    size_t bytes;
    CHECK(prefill_blocks(&server, &bytes) > 0);
    WAIT_UNTIL(after_half_a_ms(clock_sleep_of(&server.wakeup) == ASLEEP_FOR_GOOD));
    CHECK_EQUAL(prefill_blocks(&server, &bytes), 0);
    CHECK_EQUAL(blocks_out(), kept.count + 1);
    put_magazine(&me, 0, &kept);
    put_one_large(&me, 0, &large);
    finish();
}

static struct gate at_work;

static void stand(void *subject) {
    (void)subject;
    enter();
    gate_pass(&at_work);
    leave();
}

static void *run_stand(void *unused) {
    (void)unused;
    have_run(REQUEST_RUN, stand, NULL);
    return NULL;
}

static pthread_t keeper;

/* It stands in somebody's work, and serves nobody. */
static void keep_server(void) {
    gate_close(&at_work);
    CHECK(pthread_create(&keeper, NULL, run_stand, NULL) == 0);
    WAIT_UNTIL(atomic_load(&at_work.waiting) != 0);
    /* Who waited in vain before this. */
    atomic_store(&server.unresponsive_from_ns, 0);
}

static void let_server_go(void) {
    gate_open(&at_work);
    CHECK(pthread_join(keeper, NULL) == 0);
}

/* Blocks out of the heap before there is a server. */
static void take_early(uint32_t class, struct taken_magazine *magazine) {
    magazine->class = class;
    magazine->count = classes.of[class].batch;
    for (size_t i = 0; i < magazine->count; i++) {
        magazine->blocks[i] = pop(class);
    }
    hold_all(&me, magazine);
}

#define EARLY 70

/* A record that the server skips: nobody comes to claim the last slot here. */
static uint64_t stale_call(size_t payload) {
    return record_header(REQUEST_RUN, CALLS - 1, payload);
}

static void test_full_ring_overflows(void) {
    set_up(1);
    static struct taken_magazine magazines[EARLY];
    void *large[4];
    size_t words = 0;
    for (size_t i = 0; i < EARLY; i++) {
        take_early(1, &magazines[i]);
        words += magazines[i].count + 1;
    }
    CHECK(words > 2 * RING_WORDS);
    for (size_t i = 0; i < 4; i++) {
        struct block *block = pop(0);
        block->pages = 1;
        hold(&me, block);
        large[i] = block;
    }
    launch();
    keep_server();
    size_t before = heap.out;
    size_t filled = RING_WORDS;
    size_t full = 0;
    for (size_t i = 0; i < EARLY; i++) {
        size_t overflown = atomic_load(&server.overflow.count);
        size_t count = magazines[i].count;
        bool fits = filled >= count + 1;
        filled -= fits ? count + 1 : 0;
        put_magazine(&me, 0, &magazines[i]);
        CHECK_EQUAL(atomic_load(&server.overflow.count), overflown + (fits ? 0 : count));
        full += !fits;
    }
    for (; filled >= 3; filled -= 3) { /* no room for large ones either */
        ring_push(&server_endpoint(&server, 0)->ring, stale_call(2), (uint64_t[]){0, 0}, false);
    }
    for (size_t i = 0; i < 4; i++) {
        size_t overflown = atomic_load(&server.overflow.count);
        put_one_large(&me, 0, &large[i]);
        CHECK_EQUAL(atomic_load(&server.overflow.count), overflown + 1);
    }
    CHECK(full >= EARLY / 2);
    CHECK_EQUAL(heap.out, before);
    let_server_go();
    WAIT_UNTIL(blocks_out() == 0);
    finish();
}

static struct taken_magazine early[EARLY];

static void *put_early(void *unused) {
    for (size_t i = 0; i < EARLY; i++) {
        put_magazine(&me, 0, &early[i]);
    }
    return unused;
}

/* More than the ring and the overflow have room for together, while the server serves nobody. */
static pthread_t fill_overflow(uint64_t patience_ns) {
    set_up(1);
    server.overflow.region.reserved = vm_page_size();
    server.timeout_ns = patience_ns;
    for (size_t i = 0; i < EARLY; i++) {
        take_early(1, &early[i]);
    }
    size_t count = early[0].count;
    size_t room = vm_page_size() / sizeof(void *) / count * count;
    CHECK(room + RING_WORDS < EARLY * count);
    launch();
    keep_server();
    pthread_t putter;
    CHECK(pthread_create(&putter, NULL, put_early, NULL) == 0);
    WAIT_UNTIL(atomic_load(&server.overflow.count) == room);
    return putter;
}

static void test_full_overflow_waits(void) {
    pthread_t putter = fill_overflow(TIMEOUT_NS);
    let_server_go();
    CHECK(pthread_join(putter, NULL) == 0);
    WAIT_UNTIL(blocks_out() == 0);
    finish();
}

/* A thread waits no longer than that, and what it freed is lost. */
static void test_full_overflow_is_given_up(void) {
    pthread_t putter = fill_overflow(SHORT_TIMEOUT_NS);
    CHECK(pthread_join(putter, NULL) == 0);
    CHECK(atomic_load(&server.overflow.count) > 0);
    let_server_go();
    WAIT_UNTIL(overflow_is_empty(&server.overflow));
    CHECK(blocks_out() > 0);
}

/* As if 128 threads were in a call at once. */
static void test_no_slot_left(void) {
    set_up_running(1);
    struct taken_magazine magazine;
    void *large;
    struct work work = {0};
    have_run(REQUEST_RUN, do_work, &work);
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store(&server.calls[i].state, CALL_CLAIMED);
    }
    uint64_t losses = atomic_load(&server.unresponsive);
    CHECK_EQUAL(take_magazine(&me, 0, 1, &magazine), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(take_one_large(&me, 0, 1, 1, &large), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(ask_run(0, REQUEST_RUN, do_work, &work), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(work.ran, 1);
    CHECK_EQUAL(atomic_load(&server.unresponsive), losses);
    CHECK(!atomic_load(&server.unresponsive_from_ns));
    atomic_store(&server.calls[CALLS / 2].state, CALL_FREE);
    have_run(REQUEST_RUN, do_work, &work);
    CHECK_EQUAL(work.ran, 2);
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store(&server.calls[i].state, CALL_FREE);
    }
    finish();
}

static void *free_one_slot(void *unused) {
    (void)unused;
    check_nap(20000000);
    atomic_store(&server.calls[CALLS / 2].state, CALL_FREE);
    return NULL;
}

/* Who finds no slot waits for one, as long as for the server. */
static void test_slot_is_waited_for(void) {
    set_up(1);
    server.timeout_ns = TIMEOUT_NS;
    launch();
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store(&server.calls[i].state, CALL_CLAIMED);
    }
    pthread_t other;
    CHECK(pthread_create(&other, NULL, free_one_slot, NULL) == 0);
    struct taken_magazine magazine;
    CHECK_EQUAL(take_magazine(&me, 0, 1, &magazine), ANSWER_DONE);
    CHECK(magazine.count > 0);
    CHECK(pthread_join(other, NULL) == 0);
    put_magazine(&me, 0, &magazine);
    for (size_t i = 0; i < CALLS; i++) {
        atomic_store(&server.calls[i].state, CALL_FREE);
    }
    finish();
}

/* ---- calls that are given up ---- */

static void expect_lost(void) {
    struct taken_magazine magazine;
    void *large;
    struct work work = {0};
    CHECK_EQUAL(take_magazine(&me, 0, 7, &magazine), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(take_one_large(&me, 0, 7, 1, &large), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(ask_run(0, REQUEST_RUN, do_work, &work), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(work.ran, 0);
}

/* A call that the server begins, and does not end in time. */
static void abandon_one(bool large) {
    do {
        WAIT_UNTIL(!atomic_load(&server.unresponsive_from_ns));
        struct taken_magazine magazine;
        void *block;
        uint64_t losses = atomic_load(&server.unresponsive);
        CHECK_EQUAL(large ? take_one_large(&me, 0, 2, 2, &block) : take_magazine(&me, 0, 7, &magazine),
                    ANSWER_UNRESPONSIVE);
        CHECK_EQUAL(atomic_load(&server.unresponsive), losses + 1);
        /* On a machine that kept it from its work it finds the call given up before it began. */
        WAIT_UNTIL(atomic_load(&at_take.waiting) != 0 || !atomic_load(&server.unresponsive_from_ns));
    } while (atomic_load(&at_take.waiting) == 0);
}

/* Begun, and not ended in time: what was taken for it goes back. */
static void test_abandoned_in_the_midst(void) {
    let_time_fly();
    set_up_running(1);
    struct work work = {0};
    struct taken_magazine magazine;
    for (int large = 0; large < 2; large++) {
        have_run(REQUEST_RUN, do_work, &work);
        gate_close(&at_take);
        abandon_one(large);
        CHECK(atomic_load(&server.unresponsive_from_ns));
        CHECK(heap.out > 0);
        /* From here on nobody waits. */
        uint64_t losses = atomic_load(&server.unresponsive);
        expect_lost();
        CHECK_EQUAL(atomic_load(&server.unresponsive), losses);
        /* It is said when it has been so for long, once. */
        WAIT_UNTIL((expect_lost(), atomic_load(&losts) == 1));
        gate_open(&at_take);
        WAIT_UNTIL(!atomic_load(&server.unresponsive_from_ns));
        WAIT_UNTIL(blocks_out() == 0);
    }
    have_taken(7, &magazine);
    put_magazine(&me, 0, &magazine);
    let_time_stand();
    finish();
}

/* Not begun in time: it never is, and the slot is free once the server finds it so. */
static void test_abandoned_before_it_began(void) {
    let_time_fly();
    set_up_running(1);
    keep_server();
    uint64_t losses = atomic_load(&server.unresponsive);
    struct taken_magazine magazine;
    void *large;
    struct work work = {0};
    for (int i = 0; i < 4; i++) {
        CHECK_EQUAL(take_magazine(&me, 0, 7, &magazine), ANSWER_UNRESPONSIVE);
        atomic_store(&server.unresponsive_from_ns, 0);
        CHECK_EQUAL(take_one_large(&me, 0, 7, 1, &large), ANSWER_UNRESPONSIVE);
        atomic_store(&server.unresponsive_from_ns, 0);
        CHECK_EQUAL(ask_run(0, i < 3 ? REQUEST_RUN : REQUEST_RUN_LONG, do_work, &work), ANSWER_UNRESPONSIVE);
        atomic_store(&server.unresponsive_from_ns, 0);
    }
    CHECK_EQUAL(atomic_load(&server.unresponsive), losses + 12);
    unsigned abandoned = 0;
    for (size_t i = 0; i < CALLS; i++) {
        abandoned += atomic_load(&server.calls[i].state) == CALL_ABANDONED;
    }
    CHECK_EQUAL(abandoned, 12);
    CHECK_EQUAL(heap.out, 0);
    let_server_go();
    let_time_stand();
    CHECK_EQUAL(blocks_out(), 0);
    CHECK_EQUAL(work.ran, 0);
    finish();
}

/* What stands on the caller's stack is waited for, however long it takes. */
static void stand_and_work(void *subject) {
    stand(NULL);
    do_work(subject);
}

static void *run_patient(void *argument) {
    have_run(REQUEST_RUN, stand_and_work, argument);
    return NULL;
}

/* For many times as long as others are waited for; and each time the one who waits looks at the clock. */
static void pass_patience(void) {
    for (int i = 0; i < 5; i++) {
        uint64_t readings = clock_readings();
        WAIT_UNTIL(clock_readings() > readings + 1);
        clock_advance(2 * SHORT_TIMEOUT_NS);
    }
}

static void test_own_work_is_waited_for(void) {
    clock_stop();
    set_up_running(1);
    pthread_t patient;
    struct work work = {0};
    gate_close(&at_work);
    CHECK(pthread_create(&patient, NULL, run_patient, &work) == 0);
    WAIT_UNTIL(atomic_load(&at_work.waiting) != 0);
    uint64_t losses = atomic_load(&server.unresponsive);
    pass_patience();
    gate_open(&at_work);
    CHECK(pthread_join(patient, NULL) == 0);
    CHECK_EQUAL(work.ran, 1);
    CHECK_EQUAL(atomic_load(&server.unresponsive), losses);
    finish();
}

/* Long work is still requested once short calls no longer wait: it has its own, longer timeout. */
static void *run_long_work(void *argument) {
    have_run(REQUEST_RUN_LONG, do_work, argument);
    return NULL;
}

static void test_long_work_is_patient(void) {
    set_up(1);
    server.timeout_ns = TIMEOUT_NS / LONG_TIMEOUT_FACTOR;
    launch();
    struct work work = {0};
    keep_server();
    atomic_store(&server.unresponsive_from_ns, 1);
    pthread_t patient;
    CHECK(pthread_create(&patient, NULL, run_long_work, &work) == 0);
    WAIT_UNTIL(server_endpoint(&server, 0)->ring.tail != server_endpoint(&server, 0)->ring.head);
    let_server_go();
    CHECK(pthread_join(patient, NULL) == 0);
    CHECK_EQUAL(work.ran, 1);
    CHECK_EQUAL(atomic_load(&server.unresponsive), 0);
    finish();
}

/* No room for the call, for as long as a client waits. */
static void test_call_that_cannot_be_sent(void) {
    set_up_running(1);
    keep_server();
    struct ring *ring = &server_endpoint(&server, 0)->ring;
    while (ring_push(ring, stale_call(0), NULL, false)) {
    }
    struct taken_magazine magazine;
    CHECK_EQUAL(take_magazine(&me, 0, 7, &magazine), ANSWER_UNRESPONSIVE);
    unsigned free = 0;
    for (size_t i = 0; i < CALLS; i++) {
        free += atomic_load(&server.calls[i].state) == CALL_FREE;
    }
    CHECK_EQUAL(free, CALLS - 1); /* but the keeper's */
    let_server_go();
    have_taken(7, &magazine);
    put_magazine(&me, 0, &magazine);
    finish();
}

/* Who gives up late, when the server has long gone to sleep, wakes it: else nobody would be served any more.
 */
static void test_late_to_give_up(void) {
    clock_stop();
    set_up_running(1);
    struct work work = {0};
    have_run(REQUEST_RUN, do_work, &work);
    wait_until_asleep();
    server_mark_unresponsive(&server);
    WAIT_UNTIL(!atomic_load(&server.unresponsive_from_ns));
    have_run(REQUEST_RUN, do_work, &work);
    finish();
}

/* ---- long work ---- */

static _Atomic(int) long_under_way;
static _Atomic(unsigned) shorts_between;

static void short_between(void *subject) {
    (void)subject;
    enter();
    atomic_fetch_add(&shorts_between, 1);
    leave();
}

/* It serves others until both a short call was served and a long one was seen. */
static void long_work(void *subject) {
    (void)subject;
    enter();
    SERVER_CHECK(atomic_fetch_add(&long_under_way, 1) == 0);
    while (atomic_load(&shorts_between) == 0 || !server_has_deferred(&server)) {
        server_serve_between(&server);
    }
    atomic_fetch_sub(&long_under_way, 1);
    leave();
}

static void other_long_work(void *subject) {
    SERVER_CHECK(atomic_fetch_add(&long_under_way, 1) == 0);
    do_work(subject);
    atomic_fetch_sub(&long_under_way, 1);
}

static void *run_long(void *unused) {
    (void)unused;
    have_run(REQUEST_RUN_LONG, long_work, NULL);
    return NULL;
}

static void *run_other_long(void *argument) {
    have_run(REQUEST_RUN_LONG, other_long_work, argument);
    return NULL;
}

static void test_long_work_waits_for_long_work(void) {
    set_up_running(2);
    pthread_t first;
    pthread_t second;
    struct work work = {0};
    CHECK(pthread_create(&first, NULL, run_long, NULL) == 0);
    WAIT_UNTIL(atomic_load(&long_under_way) == 1);
    CHECK(pthread_create(&second, NULL, run_other_long, &work) == 0);
    have_run(REQUEST_RUN, short_between, NULL);
    CHECK(pthread_join(first, NULL) == 0);
    CHECK(pthread_join(second, NULL) == 0);
    CHECK_EQUAL(work.ran, 1);
    finish();
}

static _Atomic(unsigned) tick_waits;

/* Once asked for, the next tick is not over before a call was put off. */
static void tick_until_deferred(void) {
    if (atomic_load(&tick_waits) == 1) {
        atomic_store(&tick_waits, 2);
        while (!server_has_deferred(&server)) {
            server_serve_between(&server);
        }
        atomic_store(&tick_waits, 0);
    }
}

/* What was put off while the server tidied is served before it rests. */
static void test_put_off_by_a_tick(void) {
    clock_stop();
    set_up(1);
    on_tick = tick_until_deferred;
    launch();
    struct work work = {0};
    have_run(REQUEST_RUN, do_work, &work);
    atomic_store(&tick_waits, 1);
    PASS_TIME_UNTIL(atomic_load(&tick_waits) == 2);
    CHECK_EQUAL(ask_run(0, REQUEST_RUN_LONG, do_work, &work), ANSWER_DONE);
    CHECK_EQUAL(atomic_load(&tick_waits), 0);
    CHECK_EQUAL(work.ran, 2);
    finish();
}

/* ---- sleep ---- */

#define ABOVE 8

static void test_sleep_and_wake(void) {
    clock_stop();
    set_up(1);
    static struct taken_magazine small[ABOVE];
    size_t batch = classes.of[1].batch;
    size_t each = batch * classes.of[1].size;
    struct work work = {0};
    for (size_t i = 0; i < ABOVE; i++) {
        take_early(1, &small[i]);
    }
    struct block *large = pop(0);
    hold(&me, large);
    launch();
    have_run(REQUEST_RUN, do_work, &work);
    wait_until_asleep();

    /* Up to the bound nobody is woken; what passes it wakes. */
    uint64_t wakes = atomic_load(&server.wakes);
    size_t out = heap.out;
    give(&me, large);
    ask_put_large(0, large, MAX_BACKLOG_BYTES - 4 * each);
    given(&me, large);
    for (size_t i = 0; i < 4; i++) {
        put_magazine(&me, 0, &small[i]);
        CHECK_EQUAL(atomic_load(&server.wakes), wakes);
        CHECK_EQUAL(atomic_load(&server.state), SERVER_SLEEPS);
        CHECK_EQUAL(heap.out, out);
    }
    put_magazine(&me, 0, &small[4]);
    CHECK_EQUAL(atomic_load(&server.wakes), wakes + 1);
    WAIT_UNTIL(blocks_out() == (ABOVE - 5) * batch);

    /* A call wakes it. */
    wait_until_asleep();
    wakes = atomic_load(&server.wakes);
    struct taken_magazine magazine;
    have_taken(3, &magazine);
    CHECK(atomic_load(&server.wakes) > wakes);

    /* What was served does not count any more; and what was put before is there when it wakes. */
    wait_until_asleep();
    wakes = atomic_load(&server.wakes);
    put_magazine(&me, 0, &magazine);
    for (size_t i = 5; i < ABOVE; i++) {
        put_magazine(&me, 0, &small[i]);
    }
    CHECK_EQUAL(atomic_load(&server.wakes), wakes);
    CHECK_EQUAL(atomic_load(&server.state), SERVER_SLEEPS);
    have_run(REQUEST_RUN, do_work, &work);
    CHECK(atomic_load(&server.wakes) > wakes);
    WAIT_UNTIL(blocks_out() == 0);
    wait_until_asleep();
    finish();
}

/* Asleep and awake in turn, with several who wake it: nobody's call is left in the dark. */
static void *run_sleepy(void *argument) {
    struct client *client = argument;
    for (unsigned round = 0; round < 40 || client->done == 0; round++) {
        struct work work = {0};
        note(client, run_at_heap(client->number, REQUEST_RUN, do_work, &work));
        check_nap((long)(check_random(&client->random) % 2000000));
    }
    return NULL;
}

static void test_naps(void) {
    let_time_fly();
    set_up_running(4);
    atomic_store(&tidy, true);
    start_clients(run_sleepy);
    join_clients();
    let_time_stand();
    finish();
    CHECK(server.counts.naps > 0);
}

/* ---- no thread ---- */

static void test_refused_start(void) {
    set_up(2);
    atomic_store(&refuses_threads, true);
    heap_mode_begin(&server);
    start_clients(run_client);
    join_clients();
    CHECK_EQUAL(atomic_load(&server.thread), THREAD_REFUSED);
    CHECK_EQUAL(atomic_load(&settled), 0);
    CHECK_EQUAL(heap.lendings[SHARED_FOREGROUND], 1);
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQUAL(clients[i].lost, 0);
    }
    CHECK(server_stop(&server, server_long_timeout_ns(&server)));
    check_all_back();
    check_lent();
}

/* ---- the printed scheme ---- */

#define ONES 16

static void step_sync(struct client *client, struct one *ones) {
    unsigned i = (unsigned)(check_random(&client->random) % ONES);
    struct one *one = &ones[i];
    enum answer answer;
    if (one->block == NULL) {
        one->class = 1 + i;
        answer = take_sync(i, one);
        CHECK(answer == ANSWER_DONE || one->block == NULL);
        if (one->block != NULL) {
            CHECK_EQUAL(((struct block *)one->block)->class, one->class);
            hold(client, one->block);
        }
    } else {
        struct block *block = one->block;
        give(client, block);
        answer = put_sync(i, one);
        if (answer == ANSWER_DONE) {
            given(client, block);
            one->block = NULL;
        } else {
            atomic_store(&block->held, client->number * 4 + HELD_BY);
        }
    }
    note(client, answer);
}

static void put_ones(struct client *client, const struct one *ones) {
    for (uint32_t i = 0; i < ONES; i++) {
        if (ones[i].block != NULL) {
            struct taken_magazine magazine = {.class = 1 + i, .count = 1, .blocks = {ones[i].block}};
            put_magazine(client, i, &magazine);
        }
    }
}

static void *run_sync(void *argument) {
    struct client *client = argument;
    struct one ones[ONES] = {0};
    for (unsigned round = 0; round < rounds / 2 || client->done == 0; round++) {
        step_sync(client, ones);
    }
    put_ones(client, ones);
    return NULL;
}

static void test_sync(void) {
    set_up(2);
    serves_between = true;
    launch();
    start_clients(run_sync);
    join_clients();
    finish();
}

/* Taken back in time, a request is never served; begun, it is waited for. */
static void *run_one_sync(void *argument) {
    const struct client *client = argument;
    void *block = NULL;
    WAIT_UNTIL(ask_take_sync(4, &block) == ANSWER_DONE);
    CHECK(block != NULL);
    hold(client, block);
    give(client, block);
    ask_put(0, 4, &block, 1);
    given(client, block);
    return NULL;
}

static void test_sync_is_lost(void) {
    let_time_fly();
    set_up_running(1);
    keep_server();
    void *block = NULL;
    CHECK_EQUAL(ask_take_sync(4, &block), ANSWER_UNRESPONSIVE);
    CHECK(block == NULL);
    CHECK(atomic_load(&server.unresponsive_from_ns));
    CHECK_EQUAL(ask_take_sync(4, &block), ANSWER_UNRESPONSIVE);
    CHECK_EQUAL(atomic_load(&server.mailbox.ready), MAILBOX_EMPTY);
    let_time_stand();
    let_server_go();
    CHECK_EQUAL(blocks_out(), 0);

    struct client client = {.number = 1};
    gate_close(&at_take);
    CHECK(pthread_create(&client.thread, NULL, run_one_sync, &client) == 0);
    WAIT_UNTIL(atomic_load(&at_take.waiting) != 0);
    uint64_t losses = atomic_load(&server.unresponsive);
    pass_patience();
    gate_open(&at_take);
    CHECK(pthread_join(client.thread, NULL) == 0);
    CHECK_EQUAL(atomic_load(&server.unresponsive), losses);
    finish();
}

/* ---- forks ---- */

/* As the heap's owner does around a fork: of a heap that is shared, its lock. */
static void before_fork(void) {
    server_before_fork(&server, false);
    if (heap.shared) {
        lock_acquire(&heap.lock);
    }
}

static void after_fork(bool child) {
    if (heap.shared) {
        lock_release(&heap.lock);
    }
    if (child) {
        atomic_store(&sharers, 0);
        atomic_store(&owner_thread, this_thread());
    }
    server_after_fork(&server, child);
}

/* While it is parked nobody is at the heap, and who holds it so may read and write there. */
static void *run_parker(void *unused) {
    (void)unused;
    for (int i = 0; i < 40; i++) {
        before_fork();
        if (!server.orphaned) {
            uint64_t operations = heap.operations;
            size_t out = heap.out;
            for (int look = 0; look < 50; look++) {
                sched_yield();
                CHECK_EQUAL(heap.operations, operations);
                CHECK_EQUAL(heap.out, out);
            }
            heap.operations++;
        }
        after_fork(false);
        check_nap(100000);
    }
    return NULL;
}

static void *run_until_stopped(void *argument) {
    struct client *client = argument;
    while (!atomic_load(&stop) || client->done == 0) {
        step(client);
    }
    put_everything(client);
    return NULL;
}

static void test_parking(void) {
    set_up(3);
    serves_between = true;
    launch();
    struct work work = {0};
    have_run(REQUEST_RUN, do_work, &work);
    start_clients(run_until_stopped);
    pthread_t parkers[2];
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_create(&parkers[i], NULL, run_parker, NULL) == 0);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(pthread_join(parkers[i], NULL) == 0);
    }
    atomic_store(&stop, true);
    join_clients();
    CHECK_EQUAL(atomic_load(&server.parking), 0);
    finish();
}

/* While a thread forks nobody starts a server, whose first steps the child would have half; nor is the heap
 * shared. */
static _Atomic(unsigned) operations;

static void *run_first_calls(void *unused) {
    (void)unused;
    atomic_store(&owner_thread, this_thread());
    while (atomic_load(&server.thread) == THREAD_NONE) {
        struct work work = {0};
        have_run(REQUEST_RUN, do_work, &work);
        CHECK_EQUAL(work.ran, 1);
        atomic_fetch_add(&operations, 1);
    }
    return NULL;
}

static void test_no_start_during_a_fork(void) {
    set_up(1);
    server_before_fork(&server, false);
    pthread_t other;
    CHECK(pthread_create(&other, NULL, run_first_calls, NULL) == 0);
    WAIT_UNTIL((atomic_load(&server.open_lock.state) & LOCK_WAITED) != 0);
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_UNSET);
    server_after_fork(&server, false);
    WAIT_UNTIL(atomic_load(&operations) > 0);
    lock_acquire(&server.fork_lock); /* all that it takes of a fork that sharers do not wait for */
    uint32_t before = atomic_load(&operations);
    bool started = atomic_load(&server.thread) != THREAD_NONE;
    WAIT_UNTIL(started || atomic_load(&operations) > before + 1000);
    CHECK(started || atomic_load(&server.thread) == THREAD_NONE);
    lock_release(&server.fork_lock);
    CHECK(pthread_join(other, NULL) == 0);
    WAIT_UNTIL(is_running());
    CHECK_EQUAL(atomic_load(&settled), 1);
    finish();
}

#if defined(__SANITIZE_THREAD__)
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
    return "die_after_fork=0:atexit_sleep_ms=10";
}

/* Not on the stack of a thread of the parent's: by that ThreadSanitizer knows a thread. */
static void start_threads_elsewhere(void) {
    pthread_attr_t attributes;
    size_t bytes;
    CHECK(pthread_getattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_getstacksize(&attributes, &bytes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 2 * bytes) == 0);
    CHECK(pthread_setattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
}
#else
static void start_threads_elsewhere(void) {
}
#endif

/* Whatever the parent's threads were at, all but what they held, or were just being given, comes back here.
 */
static void live_as_child(bool refused) {
    start_threads_elsewhere();
    CHECK_EQUAL(atomic_load(&server.heap_mode), heap.shared ? HEAP_MODE_SHARED : HEAP_MODE_UNSET);
    CHECK_EQUAL(atomic_load(&server.thread), THREAD_NONE);
    check_slots_free();
    unsigned settled_before = atomic_load(&settled);
    unsigned lent_before = heap.lendings[SHARED_FOREGROUND];
    bool was_shared = heap.shared;
    atomic_store(&refuses_threads, refused);
    me.done = 0;
    for (unsigned round = 0; round < 200 || me.done == 0; round++) {
        step(&me);
    }
    put_everything(&me);
    if (refused) {
        CHECK_EQUAL(atomic_load(&server.thread), THREAD_REFUSED);
        CHECK(server_stop(&server, server_long_timeout_ns(&server)));
    } else {
        stop_server();
    }
    CHECK_EQUAL(atomic_load(&settled), settled_before + !refused);
    CHECK_EQUAL(heap.lendings[SHARED_FOREGROUND], lent_before + !was_shared);
    size_t out = 0;
    size_t on_the_way = 0;
    for (size_t i = 0; i < heap.count; i++) {
        const struct block *block = &heap.blocks[i];
        uint32_t held = atomic_load(&block->held) % 4;
        CHECK(held != HELD_BY || block->out);
        out += block->out;
        on_the_way += block->out && held != HELD_BY;
    }
    CHECK_EQUAL(out, heap.out);
    CHECK(on_the_way <= (size_t)THREADS * MAX_MAGAZINE_BLOCKS);
    check_slots_free();
    CHECK(overflow_is_empty(&server.overflow));
    check_lent();
}

static void test_fork(void) {
    set_up(3);
    serves_between = true;
    launch();
    struct work work = {0};
    have_run(REQUEST_RUN, do_work, &work);
    start_clients(run_until_stopped);
    for (int i = 0; i < 6; i++) {
        check_nap(5000000);
        before_fork();
        /* A server that the machine keeps from its work is left behind: another time. */
        bool forks = !server.orphaned;
        pid_t child = forks ? fork() : -1;
        CHECK(child >= 0 || !forks);
        after_fork(child == 0);
        if (child == 0) {
            live_as_child(i % 3 == 2);
            _exit(0);
        }
        int status;
        CHECK(!forks || waitpid(child, &status, 0) == child);
        CHECK(!forks || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
    }
    atomic_store(&stop, true);
    join_clients();
    finish();
}

/* One that never was started, and one that sleeps. */
static void test_fork_without_work(void) {
    clock_stop();
    set_up(1);
    for (int i = 0; i < 2; i++) {
        bool done = false;
        while (!done) {
            before_fork();
            done = !server.orphaned;
            pid_t child = done ? fork() : -1;
            after_fork(child == 0);
            if (child == 0) {
                start_threads_elsewhere();
                struct taken_magazine magazine;
                have_taken(3, &magazine); /* at the heap, which is shared at first */
                CHECK_EQUAL(heap.lendings[SHARED_FOREGROUND], i + 1);
                put_magazine(&me, 0, &magazine);
                launch();
                have_taken(3, &magazine);
                put_magazine(&me, 0, &magazine);
                finish();
                _exit(0);
            }
            int status;
            CHECK(!done || waitpid(child, &status, 0) == child);
            CHECK(!done || (WIFEXITED(status) && WEXITSTATUS(status) == 0));
        }
        struct work work = {0};
        if (i == 0) {
            launch();
        }
        have_run(REQUEST_RUN, do_work, &work);
        wait_until_asleep();
    }
    finish();
}

static void *stay_with_the_clients(void *unused) {
    CHECK(endpoint_enter(server_endpoint(&server, 0), ENTER_ALWAYS));
    lock_lose(&server.mailbox.clients);
    return unused;
}

/* Nor does it let go a client, whose answer it was about to give: the fork waits for neither. */
static void test_fork_with_a_lost_client(void) {
    pthread_t client;
    let_time_fly();
    set_up(1);
    launch();
    keep_server();
    CHECK(pthread_create(&client, NULL, stay_with_the_clients, NULL) == 0);
    CHECK(pthread_join(client, NULL) == 0);
    before_fork();
    CHECK(server.orphaned);
    pid_t child = fork();
    CHECK(child >= 0);
    after_fork(child == 0);
    if (child == 0) {
        expect_lost();
        struct work work = {0};
        CHECK_EQUAL(ask_run(0, REQUEST_RUN_LONG, do_work, &work), ANSWER_UNRESPONSIVE);
        CHECK(endpoint_try(server_endpoint(&server, 0)) && lock_try(&server.mailbox.clients));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(!server.orphaned);
    CHECK(!endpoint_try(server_endpoint(&server, 0)) && !lock_try(&server.mailbox.clients));
    lock_find(&server.mailbox.clients);
    endpoint_leave(server_endpoint(&server, 0));
    let_server_go();
    let_time_stand();
    finish();
}

/* One that does not come to be parked: the parent goes on with it, the child without. */
static void test_fork_with_a_lost_server(void) {
    let_time_fly();
    set_up(1);
    struct taken_magazine magazine;
    take_early(5, &magazine);
    launch();
    keep_server();
    before_fork();
    CHECK(server.orphaned);
    pid_t child = fork();
    CHECK(child >= 0);
    after_fork(child == 0);
    if (child == 0) {
        CHECK(atomic_load(&server.unresponsive_from_ns));
        expect_lost();
        struct work work = {0};
        CHECK_EQUAL(ask_run(0, REQUEST_RUN_LONG, do_work, &work), ANSWER_UNRESPONSIVE);
        CHECK_EQUAL(work.ran, 0);
        put_magazine(&me, 0, &magazine);
        CHECK(!server_stop(&server, server_long_timeout_ns(&server)));
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(!server.orphaned);
    let_server_go();
    let_time_stand();
    put_magazine(&me, 0, &magazine);
    finish();
}

/* ---- stop ---- */

/* While clients come: each is answered, or told that there is no server any more. */
static void *run_to_the_end(void *argument) {
    struct client *client = argument;
    enum answer answer = ANSWER_DONE;
    while (answer != ANSWER_SHARED) {
        struct work work = {0};
        answer = ask_run(client->number, REQUEST_RUN, do_work, &work);
        CHECK_EQUAL(work.ran, answer == ANSWER_DONE);
        client->done += work.ran;
    }
    return NULL;
}

static void test_stop_among_clients(void) {
    set_up_running(3);
    start_clients(run_to_the_end);
    check_nap(20000000);
    stop_server();
    join_clients();
    CHECK_EQUAL(heap.out, 0);
    check_lent();
}

/* ---- the heap is shared ---- */

static void set_up_lending(unsigned endpoints) {
    set_up(endpoints);
    server.always_exclusive = false;
    server.timeout_ns = TIMEOUT_NS / LONG_TIMEOUT_FACTOR; /* no client gives up */
    serves_between = true;
    watches_prefilled = true;
}

static bool is_lent(void) {
    return atomic_load(&server.heap_mode) == HEAP_MODE_SHARED;
}

static bool rings_until(bool (*is_so)(void)) {
    server_wake_always(&server);
    return is_so();
}

static void have_lent(void) {
    atomic_store(&crowded, true);
    WAIT_UNTIL(rings_until(is_lent));
    atomic_store(&crowded, false);
}

static void have_taken_back(void) {
    atomic_store(&has_room, true);
    WAIT_UNTIL(rings_until(is_running));
    atomic_store(&has_room, false);
}

static void *run_sync_until_stopped(void *argument) {
    struct client *client = argument;
    struct one ones[ONES] = {0};
    while (!atomic_load(&stop) || client->done == 0) {
        step_sync(client, ones);
    }
    put_ones(client, ones);
    return NULL;
}

/* Nor do they lose it to forks, for which it is parked. */
static void test_sync_beside_forks(void) {
    set_up_lending(2);
    launch();
    start_clients(run_sync_until_stopped);
    for (int i = 0; i < 100; i++) {
        before_fork();
        CHECK(!server.orphaned);
        after_fork(false);
        check_nap(100000);
    }
    atomic_store(&stop, true);
    join_clients();
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQUAL(clients[i].lost, 0);
        CHECK(clients[i].done > 0);
    }
    CHECK_EQUAL(atomic_load(&server.unresponsive), 0);
    finish();
}

static struct client sync_client = {.number = THREADS + 2, .random = 88172645463325252U};

static void start_all(void) {
    start_clients(run_until_stopped);
    CHECK(pthread_create(&sync_client.thread, NULL, run_sync_until_stopped, &sync_client) == 0);
}

static void stop_all(void) {
    atomic_store(&stop, true);
    join_clients();
    CHECK(pthread_join(sync_client.thread, NULL) == 0);
    CHECK_EQUAL(sync_client.lost, 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        CHECK_EQUAL(clients[i].lost, 0);
        CHECK(clients[i].done > 0);
    }
    CHECK_EQUAL(atomic_load(&server.unresponsive), 0);
}

#define LENDINGS 40

/* Over and over, among clients: each is served by the server or at the heap, and nobody by neither. */
static void test_lent_and_taken_back(void) {
    set_up_lending(3);
    launch();
    start_all();
    uint64_t random = seed * 4711;
    for (int i = 0; i < LENDINGS; i++) {
        check_nap((long)(check_random(&random) % 1500000));
        have_lent();
        check_nap((long)(check_random(&random) % 1500000));
        have_taken_back();
    }
    stop_all();
    finish();
    CHECK_EQUAL(heap.lendings[SHARED_BACKGROUND], LENDINGS);
    CHECK_EQUAL(heap.takings, 1 + LENDINGS);
    CHECK_EQUAL(atomic_load(&settled), 1 + LENDINGS); /* it looks each time which CPU is idle */
    CHECK(server.counts.calls > 0);
    CHECK_EQUAL(server.counts.shared_switches, LENDINGS);
}

/* The same as fast as the server can, and as often as it took the heap back twice. */
static void test_lent_and_taken_back_at_once(void) {
    set_up_lending(2);
    launch();
    start_all();
    atomic_store(&crowded, true);
    atomic_store(&has_room, true);
    for (int i = 0; i < 400 || atomic_load(&settled) < 3; i++) {
        server_wake_always(&server);
        check_nap(500000);
    }
    atomic_store(&crowded, false);
    have_taken_back();
    stop_all();
    finish();
    CHECK(heap.lendings[SHARED_BACKGROUND] > 1);
    CHECK_EQUAL(heap.takings, 1 + heap.lendings[SHARED_BACKGROUND]);
}

/* A thread in an endpoint is waited for: the stock there goes back, too, before the heap is shared. */
static void *run_lend(void *unused) {
    (void)unused;
    have_lent();
    return NULL;
}

static void test_lent_beside_a_client(void) {
    set_up_lending(1);
    launch();
    struct taken_magazine magazine;
    size_t bytes;
    have_taken(9, &magazine);
    WAIT_UNTIL(prefill_blocks(&server, &bytes) > 0);
    CHECK(endpoint_enter(server_endpoint(&server, 0), ENTER_ALWAYS));
    bool had_prefilled = prefill_blocks(&server, &bytes) > 0; /* unless an epoch ended meanwhile */
    pthread_t lender;
    CHECK(pthread_create(&lender, NULL, run_lend, NULL) == 0);
    WAIT_UNTIL(atomic_load(&told_crowded) > 0);
    check_nap(1000000);
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_EXCLUSIVE);
    endpoint_leave(server_endpoint(&server, 0));
    CHECK(pthread_join(lender, NULL) == 0);
    CHECK_EQUAL(prefill_blocks(&server, &bytes), 0);
    CHECK_EQUAL(heap.out, magazine.count);
    CHECK(!had_prefilled || server.counts.prefill_unused > 0);
    put_magazine(&me, 0, &magazine);
    CHECK_EQUAL(heap.out, 0);
    finish();
}

/* Also one that is within a push onto the overflow, where much may lie. */
static void test_lent_beside_a_push(void) {
    set_up_lending(1);
    launch();
    struct taken_magazine magazine;
    have_taken(9, &magazine);
    keep_server();
    for (size_t i = 0; i < magazine.count; i++) {
        give(&me, magazine.blocks[i]);
    }
    CHECK(overflow_push(&server.overflow, magazine.blocks, magazine.count));
    lock_acquire(&server.overflow.lock);
    atomic_store(&crowded, true);
    let_server_go();
    WAIT_UNTIL(atomic_load(&told_crowded) > 0);
    check_nap(1000000);
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_EXCLUSIVE);
    CHECK_EQUAL(atomic_load(&server.overflow.count), magazine.count);
    lock_release(&server.overflow.lock);
    have_lent();
    for (size_t i = 0; i < magazine.count; i++) {
        given(&me, magazine.blocks[i]);
    }
    CHECK(overflow_is_empty(&server.overflow));
    CHECK_EQUAL(heap.out, 0);
    finish();
}

/* A heap that is shared has all of its blocks. */
static void test_spares_when_lent(void) {
    set_up_lending(1);
    launch();
    struct taken_magazine magazine;
    have_taken(9, &magazine);
    put_magazine(&me, 0, &magazine);
    have_lent();
    CHECK_EQUAL(heap.out, 0);
    finish();
}

/* While the heap is shared the server tidies it. */
static void test_lent_heap_is_tidied(void) {
    set_up_lending(1);
    launch();
    have_lent();
    unsigned before = atomic_load(&ticks);
    WAIT_UNTIL(atomic_load(&ticks) > before + 2);
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_SHARED);
    finish();
}

/* A server that is to keep the heap does, however many others there are. */
static void test_kept_under_contention(void) {
    set_up_running(1);
    atomic_store(&crowded, true);
    unsigned before = atomic_load(&ticks);
    WAIT_UNTIL(atomic_load(&ticks) > before);
    CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_EXCLUSIVE);
    CHECK_EQUAL(heap.lendings[SHARED_BACKGROUND], 0);
    finish();
}

/* At its end the heap is given away for good; also if it is shared, among sharers. */
static void test_stop_while_lent(void) {
    set_up_lending(2);
    launch();
    start_all();
    have_lent();
    check_nap(5000000);
    stop_server();
    check_nap(5000000);
    stop_all();
    check_all_back();
    check_lent();
}

/* Of a heap that is shared a fork leaves nothing half done, whatever sharers and server are at. */
static void test_fork_while_lent(void) {
    set_up_lending(3);
    launch();
    start_all();
    for (int i = 0; i < 6; i++) {
        have_lent();
        check_nap(2000000);
        atomic_store(&has_room, i % 2 == 1); /* it may be just taking the heap back */
        server_wake_always(&server);
        before_fork();
        CHECK(!server.orphaned);
        pid_t child = fork();
        CHECK(child >= 0);
        after_fork(child == 0);
        if (child == 0) {
            server.always_exclusive = true;
            live_as_child(i % 3 == 2);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
        have_taken_back();
    }
    stop_all();
    finish();
}

/* ---- the beginning ---- */

/* How often somebody came to the heap before a server was started. */
static unsigned operations_before_start(void) {
    unsigned count = 0;
    while (atomic_load(&server.thread) == THREAD_NONE) {
        struct taken_magazine magazine;
        CHECK(count < 100000);
        count += 2;
        CHECK_EQUAL(take_magazine(&me, 0, 1 + count % 40, &magazine), ANSWER_DONE);
        put_magazine(&me, 0, &magazine);
        CHECK_EQUAL(heap.lendings[SHARED_FOREGROUND], 1);
    }
    WAIT_UNTIL(is_running());
    return count;
}

/* One that comes to the heap a few times has no thread; one that goes on has; and so has each of its
 * children.
 */
static void test_start_after_operations(void) {
    set_up(1);
    unsigned before = operations_before_start();
    CHECK(before > 20);
    CHECK_EQUAL(atomic_load(&settled), 1);
    before_fork();
    if (!server.orphaned) {
        pid_t child = fork();
        CHECK(child >= 0);
        after_fork(child == 0);
        if (child == 0) {
            start_threads_elsewhere();
            heap.lendings[SHARED_FOREGROUND] = 0;
            CHECK_EQUAL(operations_before_start(), before);
            finish();
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    } else {
        after_fork(false);
    }
    finish();
}

/* What lay in the ring, on the overflow list and in the stock when the process forked goes back to the heap
 * where the child begins; but calls are their callers', who are not there. */
static void test_begin_with_records_in_flight(void) {
    clock_stop();
    set_up(2);
    struct taken_magazine magazines[3];
    struct taken_magazine kept;
    for (int i = 0; i < 3; i++) {
        take_early(1, &magazines[i]);
    }
    struct block *large = pop(0);
    large->pages = 1;
    hold(&me, large);
    struct block *overflown = pop(7);
    hold(&me, overflown);
    launch();
    have_taken(9, &kept);
    size_t bytes;
    wait_until_asleep();
    /* As if they had come to lie there just now: the server sleeps, and has stock ready. */
    struct endpoint *endpoint = server_endpoint(&server, 0);
    for (int i = 0; i < 3; i++) {
        put_magazine(&me, 0, &magazines[i]);
    }
    void *large_block = large;
    put_one_large(&me, 0, &large_block);
    struct work work = {0};
    struct call *call = &server.calls[CALLS - 1];
    call->request.kind = REQUEST_RUN;
    call->request.work = do_work;
    call->request.subject = &work;
    atomic_store(&call->state, CALL_PENDING);
    CHECK(ring_push(&endpoint->ring, stale_call(0), NULL, true));
    give(&me, overflown);
    CHECK(overflow_push(&server.overflow, (void *[]){overflown}, 1));
    given(&me, overflown);
    CHECK_EQUAL(atomic_load(&server.state), SERVER_SLEEPS);
    size_t out = heap.out;
    CHECK(out >= 3 * magazines[0].count + 2 + kept.count);

    before_fork();
    CHECK(!server.orphaned);
    bool in_flight = endpoint->ring.tail != endpoint->ring.head;
    pid_t child = fork();
    CHECK(child >= 0);
    after_fork(child == 0);
    if (child == 0) {
        start_threads_elsewhere();
        CHECK(in_flight);
        CHECK_EQUAL(heap.out, out);
        CHECK_EQUAL(atomic_load(&server.heap_mode), HEAP_MODE_UNSET);
        unsigned lendings = heap.lendings[SHARED_FOREGROUND];
        put_magazine(&me, 0, &kept); /* who comes first begins */
        CHECK_EQUAL(heap.lendings[SHARED_FOREGROUND], lendings + 1);
        CHECK_EQUAL(heap.out, 0);
        CHECK_EQUAL(prefill_blocks(&server, &bytes), 0);
        CHECK_EQUAL(work.ran, 0);
        check_all_back();
        launch();
        finish();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    WAIT_UNTIL(atomic_load(&call->state) % CALL_SLEEPING == CALL_DONE);
    CHECK_EQUAL(work.ran, 1);
    atomic_store(&call->state, CALL_FREE);
    put_magazine(&me, 0, &kept);
    finish();
}

struct test {
    const char *name;
    void (*run)(void);
    size_t spare_bytes;
};

#define TEST(name) \
    { #name, test_##name, 0 }
#define TEST_WITH_SPARES(name) \
    { #name "_with_spares", test_##name, CLIENT_CACHE_CLASS_BYTES }

static const struct test tests[] = {
    TEST(many_clients),
    TEST_WITH_SPARES(many_clients),
    TEST(short_of_memory),
    TEST(stock_bounds),
    TEST(stock_serves),
    TEST(withdrawal),
    TEST_WITH_SPARES(spares),
    TEST_WITH_SPARES(spares_when_lent),
    TEST(full_ring_overflows),
    TEST(full_overflow_waits),
    TEST(full_overflow_is_given_up),
    TEST(no_slot_left),
    TEST(slot_is_waited_for),
    TEST(abandoned_in_the_midst),
    TEST(abandoned_before_it_began),
    TEST(own_work_is_waited_for),
    TEST(long_work_is_patient),
    TEST(call_that_cannot_be_sent),
    TEST(late_to_give_up),
    TEST(long_work_waits_for_long_work),
    TEST(put_off_by_a_tick),
    TEST(sleep_and_wake),
    TEST(sleep_leaves_nothing_ready),
    TEST_WITH_SPARES(sleep_leaves_nothing_ready),
    TEST(naps),
    TEST(refused_start),
    TEST(sync),
    TEST(sync_is_lost),
    TEST(parking),
    TEST(no_start_during_a_fork),
    TEST(fork),
    TEST_WITH_SPARES(fork),
    TEST(fork_without_work),
    TEST(fork_with_a_lost_server),
    TEST(fork_with_a_lost_client),
    TEST(stop_among_clients),
    TEST_WITH_SPARES(stop_among_clients),
    TEST(sync_beside_forks),
    TEST(lent_and_taken_back),
    TEST_WITH_SPARES(lent_and_taken_back),
    TEST(lent_and_taken_back_at_once),
    TEST_WITH_SPARES(lent_and_taken_back_at_once),
    TEST(lent_beside_a_client),
    TEST(lent_beside_a_push),
    TEST(lent_heap_is_tidied),
    TEST(kept_under_contention),
    TEST(stop_while_lent),
    TEST(fork_while_lent),
    TEST_WITH_SPARES(fork_while_lent),
    TEST(start_after_operations),
    TEST(begin_with_records_in_flight),
};

/* test_server [part of the tests' names] */
int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    const char *part = argc > 1 ? argv[1] : "";
    seed = check_seed(1);
    rounds = (unsigned)check_rounds(rounds);
    size_classes_fill(&classes, vm_page_size());
    for (size_t i = 0; i < sizeof tests / sizeof tests[0]; i++) {
        if (strstr(tests[i].name, part) != NULL) {
            double start = check_seconds();
            spare_bytes = tests[i].spare_bytes;
            in_child(tests[i].run);
            printf("%s: %.0f ms\n", tests[i].name, (check_seconds() - start) * 1000);
        }
    }
    return 0;
}
