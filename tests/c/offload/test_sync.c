/* The mailbox of test_sync: one message for each call, whatever the server does. */
#include "fake_heap.h"

#include "offload/sync.h"
#include "os/syscall.h"

#define THREADS 4

static _Atomic(uint64_t) answered;

static void take_and_put(uint32_t size_class) {
    void *block = NULL;
    if (client_ask_sync(&server, size_class, &block)) {
        CHECK(block != NULL);
        atomic_fetch_add(&answered, 1);
        if (!client_ask_sync(&server, size_class, &block)) {
            server_put(&server, size_class, &block, 1);
        }
    }
}

static void *run_client(void *argument) {
    uint64_t random = 1 + (uintptr_t)argument;
    for (uint64_t i = check_rounds(300); i > 0; i--) {
        take_and_put(1 + (uint32_t)(check_random(&random) % 20));
    }
    return NULL;
}

static void run_clients(void (*meanwhile)(void)) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_client, (void *)i) == 0);
    }
    if (meanwhile != NULL) {
        meanwhile();
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

static void test_each_is_one_message(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    run_clients(NULL);
    CHECK_EQUAL(atomic_load(&answered), THREADS * check_rounds(300));
    CHECK_EQUAL(atomic_load(&server.counts.records), 0);
    finish();
}

static void stop_and_start(void) {
    for (int i = 0; i < 5; i++) {
        check_nap(1000000);
        stop_server();
        launch();
    }
}

static void test_beside_ends_and_starts(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    run_clients(stop_and_start);
    finish();
}

static void keep_it_waiting(void) {
    for (int i = 0; i < 20; i++) {
        gate_close();
        check_nap(300000);
        gate_open();
        check_nap(100000);
    }
}

/* A request that the server has taken is waited for, another retracted. */
static void test_a_late_server(void) {
    set_up(1, 0, 100000);
    launch();
    run_clients(keep_it_waiting);
    finish();
}

static void test_retracted(void) {
    set_up(1, 0, SHORT_TIMEOUT_NS);
    launch();
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    void *block = NULL;
    CHECK(!client_ask_sync(&server, 3, &block));
    CHECK(server_is_late(&server));
    CHECK_EQUAL(atomic_load(&server.mailbox.ready), MAILBOX_EMPTY);
    lock_release(&server.lock);
    WAIT_UNTIL(!server_is_late(&server));
    finish();
}

/* In the child another thread held the mailbox. */
static void test_fork(void) {
    set_up(1, 0, LONG_TIMEOUT_NS);
    launch();
    take_and_put(3);
    atomic_store(&server.mailbox.clients.state, 8);
    atomic_store(&server.mailbox.done, 1);
    CHECK(server_before_fork(&server, false));
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        server_start_child(&server, true);
        CHECK_EQUAL(atomic_load(&server.mailbox.done), 0);
        CHECK(!lock_is_held(&server.mailbox.clients));
        _exit(0);
    }
    server_after_fork_in_parent(&server, true);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    atomic_store(&server.mailbox.clients.state, LOCK_FREE);
    atomic_store(&server.mailbox.done, 0);
    finish();
}

int main(void) {
    in_child(test_each_is_one_message);
    in_child(test_beside_ends_and_starts);
    in_child(test_a_late_server);
    in_child(test_retracted);
    in_child(test_fork);
    return 0;
}
