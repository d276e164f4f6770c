/*
 * The server's thread: it sleeps without work, and wakes for it; before it sleeps for good all blocks that no
 * client wanted are back in the heap; without a CPU of its own it stops serving, and serves again later.
 */
#include "fake_heap.h"

#include "os/syscall.h"

static void start(size_t cache_bytes) {
    set_up(2, cache_bytes, LONG_TIMEOUT_NS);
    launch();
    clock_stop();
    server_wake_always(&server);
}

static bool sleeps_for_good(void) {
    return clock_sleep_of(&server.words.wakeup) == ASLEEP_FOR_GOOD &&
           atomic_load(&server.words.state) == SERVER_SLEEPS;
}

/* Time passes until it does. */
static void let_it_sleep(void) {
    WAIT_UNTIL((clock_advance(sleeps_for_good() ? 0 : 10 * CLOCK_MS), sleeps_for_good()));
}

static void test_sleeps_and_wakes(void) {
    start(0);
    let_it_sleep();
    uint64_t calls = atomic_load(&server.counts.calls);
    struct held held;
    CHECK(ask(0, &held, 3, 0)); /* the client waits for it as long as it takes */
    CHECK_EQUAL(atomic_load(&server.counts.calls), calls + 1);
    give_up(0, &held);
    let_it_sleep();
    CHECK_EQUAL(atomic_load(&heap.out), 0);
    finish();
}

/* A client's queues and caches are empty, and the ring too, however the blocks came there. */
static void test_sleep_leaves_nothing(void) {
    start(64 << 10);
    for (uint32_t size_class = 0; size_class < 40; size_class++) {
        struct held held[3];
        for (size_t i = 0; i < 3; i++) {
            obtain(size_class % 2, &held[i], size_class, 3);
        }
        for (size_t i = 0; i < 3; i++) {
            give_up(size_class % 2, &held[i]);
        }
    }
    CHECK(atomic_load(&heap.out) > 0);
    let_it_sleep();
    CHECK_EQUAL(atomic_load(&heap.out), 0);
    CHECK_EQUAL(prepared_blocks(), 0);
    finish();
}

/* Nor does a free stay in a client cache, or in the ring, while the server sleeps. */
static void test_a_free_wakes_it_from_its_sleep(void) {
    start(64 << 10);
    struct held held[2];
    obtain(0, &held[0], 3, 0);
    obtain(0, &held[1], 0, 4);
    let_it_sleep();
    give_up(0, &held[0]); /* into the cache */
    let_it_sleep();
    give_up(0, &held[1]); /* into the ring */
    let_it_sleep();
    CHECK_EQUAL(atomic_load(&heap.out), 0);
    finish();
}

static void test_much_freed_memory_ends_a_nap(void) {
    start(0);
    struct held held[8];
    for (size_t i = 0; i < 8; i++) {
        obtain(0, &held[i], 0, 100);
    }
    WAIT_UNTIL((clock_advance(atomic_load(&server.words.state) == SERVER_DOZES ? 0 : CLOCK_MS),
                atomic_load(&server.words.state) == SERVER_DOZES));
    uint64_t records = atomic_load(&server.counts.records);
    for (size_t i = 0; i < 8; i++) {
        CHECK(give_up(0, &held[i]));
    }
    WAIT_UNTIL(atomic_load(&server.counts.records) > records); /* though no time passes */
    finish();
}

static void test_a_late_server_does_not_sleep(void) {
    start(0);
    let_it_sleep();
    server_mark_late(&server);
    WAIT_UNTIL(!server_is_late(&server));
    finish();
}

/* ---- contention ---- */

static void test_pauses_under_contention(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    for (int i = 0; i < 3; i++) {
        struct held held;
        obtain(0, &held, 5, 0);
        give_up(0, &held);
        obtain(1, &held, 0, 2);
        atomic_store(&has_room, false);
        atomic_store(&is_contended, true);
        WAIT_UNTIL(!server_serves(&server));
        CHECK(!give_up(1, &held));
        CHECK(!ask(0, &held, 5, 0));
        WAIT_UNTIL(atomic_load(&heap.out) == 0);
        CHECK_EQUAL(prepared_blocks(), 0);
        atomic_store(&is_contended, false);
        atomic_store(&has_room, true);
        WAIT_UNTIL(server_serves(&server));
        WAIT_UNTIL(ask(0, &held, 7, 0));
        give_up(0, &held);
    }
    CHECK_EQUAL(atomic_load(&server.counts.pauses), 3);
    finish();
}

static _Atomic(bool) stop;

static void *use_blocks(void *argument) {
    uint64_t random = 1 + (uintptr_t)argument;
    while (!atomic_load(&stop)) {
        struct held held;
        obtain((unsigned)(uintptr_t)argument, &held, (uint32_t)(check_random(&random) % 20), 2);
        give_up((unsigned)(uintptr_t)argument, &held);
    }
    return NULL;
}

/* Clients see late that it does not serve, or does again: no block is lost. */
static void test_pauses_among_clients(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    pthread_t threads[3];
    for (uintptr_t i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, use_blocks, (void *)i) == 0);
    }
    for (uint64_t i = check_rounds(10); i > 0; i--) {
        atomic_store(&is_contended, true);
        WAIT_UNTIL(!server_serves(&server));
        atomic_store(&is_contended, false);
        WAIT_UNTIL(server_serves(&server));
    }
    atomic_store(&stop, true);
    for (size_t i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    finish();
}

int main(void) {
    in_child(test_sleeps_and_wakes);
    in_child(test_sleep_leaves_nothing);
    in_child(test_a_free_wakes_it_from_its_sleep);
    in_child(test_much_freed_memory_ends_a_nap);
    in_child(test_a_late_server_does_not_sleep);
    in_child(test_pauses_under_contention);
    in_child(test_pauses_among_clients);
    return 0;
}
