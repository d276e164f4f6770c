/*
 * Clients of the server: what they take is prepared or asked for; a call that the server does not answer in
 * time is abandoned, and its blocks are neither lost nor handed out twice; a client that finds no server, no
 * endpoint or no room does the work itself.
 */
#include "fake_heap.h"

#include <sched.h>

#define THREADS 6
#define HELD    6

static uint64_t seed;
static unsigned rounds = 1500;

/* ---- many clients ---- */

static _Atomic(bool) stop;

struct client {
    pthread_t thread;
    unsigned number;
    uint64_t answered;
};

static void *run_client(void *argument) {
    struct client *client = argument;
    struct held held[HELD] = {{0}};
    uint64_t random = seed * 7919 + client->number;
    for (unsigned i = 0; i < rounds; i++) {
        struct held *one = &held[check_random(&random) % HELD];
        unsigned number = client->number + (unsigned)(check_random(&random) % 2);
        if (one->count > 0) {
            give_up(number, one);
        } else {
            uint32_t size_class = (uint32_t)(check_random(&random) % 12);
            obtain(number, one, size_class, 1 + check_random(&random) % 3);
        }
        if (check_random(&random) % 64 == 0) {
            sched_yield();
        }
    }
    for (size_t i = 0; i < HELD; i++) {
        give_up(client->number, &held[i]);
    }
    return NULL;
}

static void *run_flusher(void *unused) {
    while (!atomic_load(&stop)) {
        server_flush(&server, SHORT_TIMEOUT_NS);
        check_nap(300000);
    }
    return unused;
}

static void run_clients(unsigned endpoints, size_t cache_bytes, uint64_t timeout_ns) {
    set_up(endpoints, cache_bytes, timeout_ns);
    launch();
    struct client clients[THREADS];
    pthread_t flusher;
    CHECK(pthread_create(&flusher, NULL, run_flusher, NULL) == 0);
    for (unsigned i = 0; i < THREADS; i++) {
        clients[i] = (struct client){.number = i};
        CHECK(pthread_create(&clients[i].thread, NULL, run_client, &clients[i]) == 0);
    }
    for (unsigned i = 0; i < THREADS; i++) {
        CHECK(pthread_join(clients[i].thread, NULL) == 0);
    }
    atomic_store(&stop, true);
    CHECK(pthread_join(flusher, NULL) == 0);
    CHECK(atomic_load(&server.counts.records) > 0);
    finish();
}

static void test_many_clients(void) {
    run_clients(4, 0, LONG_TIMEOUT_NS);
}

static void test_with_client_caches(void) {
    run_clients(4, 64 << 10, LONG_TIMEOUT_NS);
}

/* So short that a busy machine's server is late again and again. */
static void test_impatient_clients(void) {
    run_clients(2, 4096, 1000);
}

static void test_one_endpoint(void) {
    run_clients(1, 4096, LONG_TIMEOUT_NS);
}

/* ---- a server that is late ---- */

static void *ask_once(void *argument) {
    struct held *held = argument;
    ask(0, held, 5, 0);
    return NULL;
}

/* The server is at the call while the client abandons it: it puts the blocks back. */
static void test_abandoned_while_the_server_is_at_it(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    clock_stop();
    gate_close();
    pthread_t thread;
    struct held held;
    CHECK(pthread_create(&thread, NULL, ask_once, &held) == 0);
    WAIT_UNTIL(gate_has_waiter());
    CHECK(atomic_load(&heap.out) > 0);
    WAIT_UNTIL((clock_advance(LONG_TIMEOUT_NS / 4), server_is_late(&server)));
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK_EQUAL(held.count, 0);
    gate_open();
    WAIT_UNTIL((clock_advance(CLOCK_MS), !server_is_late(&server)));
    WAIT_UNTIL((clock_advance(CLOCK_MS), ask(0, &held, 7, 0)));
    CHECK_EQUAL(atomic_load(&server.counts.late), 1);
    give_up(0, &held);
    finish();
}

/* The server does not come to the call before the client abandons it, and then does nothing for it. */
static void test_abandoned_before_it_began(void) {
    set_up(1, 0, SHORT_TIMEOUT_NS);
    launch();
    struct held held;
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false)); /* so that it does not serve */
    uint64_t takes = atomic_load(&heap.takes);
    CHECK(!ask(0, &held, 5, 0));
    CHECK(server_is_late(&server));
    CHECK(!ask(0, &held, 5, 0)); /* which does not wait */
    obtain(0, &held, 5, 0);
    give_up(0, &held);
    CHECK_EQUAL(atomic_load(&heap.takes), takes + 1);
    lock_release(&server.lock);
    WAIT_UNTIL(!server_is_late(&server));
    for (size_t i = 0; i < CALLS; i++) {
        WAIT_UNTIL(atomic_load(&server.calls[i].state) == CALL_FREE);
    }
    CHECK_EQUAL(atomic_load(&server.counts.calls), 0);
    finish();
}

static void *ask_in_loop(void *argument) {
    uint64_t random = seed + (uintptr_t)argument;
    for (unsigned i = 0; i < rounds / 4; i++) {
        struct held held;
        obtain(0, &held, 1 + (uint32_t)(check_random(&random) % 30), 0);
        give_up(0, &held);
    }
    return NULL;
}

/* The server is stopped again and again, at any moment. */
static void test_stopped_at_any_moment(void) {
    set_up(2, 0, 100000);
    launch();
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, ask_in_loop, (void *)(i + 1)) == 0);
    }
    for (int i = 0; i < 50; i++) {
        gate_close();
        check_nap(200000);
        gate_open();
        check_nap(200000);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    finish();
}

/* ---- work that clients do themselves ---- */

static void test_no_slot_is_free(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    for (size_t i = 0; i < CALLS; i++) {
        CHECK(call_claim(server.calls, 0) != NULL);
    }
    struct held held;
    CHECK(!ask(0, &held, 5, 0));
    for (size_t i = 0; i < CALLS; i++) {
        call_free(&server.calls[i]);
    }
    WAIT_UNTIL(ask(0, &held, 5, 0)); /* the server may be in the endpoint */
    give_up(0, &held);
    finish();
}

static void test_no_endpoint_is_free(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    launch();
    struct held held;
    obtain(0, &held, 5, 0);
    CHECK(endpoint_enter(server_open(&server, 0), 1000) && endpoint_enter(server_open(&server, 1), 1000));
    CHECK(!give_up(0, &held));
    CHECK(!ask(0, &held, 5, 0));
    endpoint_leave(server_endpoint(&server, 0));
    WAIT_UNTIL((obtain(1, &held, 5, 0), give_up(1, &held))); /* next to its own, unless the server is in it */
    endpoint_leave(server_endpoint(&server, 1));
    finish();
}

static void test_no_room_in_the_ring(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    enum { MAGAZINES = 200 };
    static struct held held[MAGAZINES];
    for (size_t i = 0; i < MAGAZINES; i++) {
        obtain(0, &held[i], 1, 0);
    }
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    bool sent_first = give_up(0, &held[0]);
    bool sent = true;
    for (size_t i = 1; i < MAGAZINES; i++) {
        sent = give_up(0, &held[i]);
    }
    lock_release(&server.lock);
    CHECK(sent_first && !sent);
    finish();
}

static void test_before_the_server_starts(void) {
    set_up(2, 64 << 10, LONG_TIMEOUT_NS);
    struct held held;
    CHECK(!ask(0, &held, 5, 0));
    obtain(0, &held, 5, 0);
    CHECK(!give_up(0, &held));
    CHECK_EQUAL(atomic_load(&heap.out), 0);
}

static void test_short_of_memory(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    launch();
    atomic_store(&heap.is_short, true);
    struct held held;
    CHECK(!ask(0, &held, 5, 0));
    CHECK(!ask(0, &held, 0, 2));
    CHECK(!server_is_late(&server));
    atomic_store(&heap.is_short, false);
    WAIT_UNTIL(ask(0, &held, 0, 2)); /* the server may be in the endpoint, for what it prefilled */
    give_up(0, &held);
    finish();
}

int main(void) {
    seed = check_seed(1);
    rounds = (unsigned)check_rounds(rounds);
    in_child(test_many_clients);
    in_child(test_with_client_caches);
    in_child(test_impatient_clients);
    in_child(test_one_endpoint);
    in_child(test_abandoned_while_the_server_is_at_it);
    in_child(test_abandoned_before_it_began);
    in_child(test_stopped_at_any_moment);
    in_child(test_no_slot_is_free);
    in_child(test_no_endpoint_is_free);
    in_child(test_no_room_in_the_ring);
    in_child(test_before_the_server_starts);
    in_child(test_short_of_memory);
    return 0;
}
