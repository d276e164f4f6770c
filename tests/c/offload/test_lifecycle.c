/*
 * The server's start and end, and forks: in whatever state the parent's server and clients are, the child has
 * all blocks that the parent's other threads did not hold, and both go on.
 */
#include "child_threads.h"
#include "fake_heap.h"

#include "os/syscall.h"

#define CLIENTS 3

static uint64_t seed;

/* ---- start and end ---- */

static void test_starts_after_many_operations(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    for (int i = 0; i < 64; i++) {
        server_note_operation(&server);
        CHECK_EQUAL(atomic_load(&server.words.thread), THREAD_NONE);
    }
    server_note_operation(&server);
    CHECK_EQUAL(atomic_load(&server.words.thread), THREAD_STARTED);
    WAIT_UNTIL(server_serves(&server));
    finish();
}

static void test_a_refused_start_is_the_last(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    atomic_store(&refuses_threads, true);
    for (int i = 0; i < 100; i++) {
        server_note_operation(&server);
    }
    CHECK_EQUAL(atomic_load(&server.words.thread), THREAD_REFUSED);
    atomic_store(&refuses_threads, false);
    server_note_operation(&server);
    CHECK(thread_is_gone(&server.locked.worker));
    struct held held;
    obtain(0, &held, 3, 0);
    CHECK(!give_up(0, &held));
    finish();
}

static void test_none_starts_while_starts_are_held(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    atomic_store(&thread_start_holds, 1);
    for (int i = 0; i < 100; i++) {
        server_note_operation(&server);
    }
    CHECK_EQUAL(atomic_load(&server.words.thread), THREAD_NONE);
    atomic_store(&thread_start_holds, 0);
    launch();
    finish();
}

static void *note_operations(void *unused) {
    for (int i = 0; i < 200; i++) {
        server_note_operation(&server);
    }
    return unused;
}

static void test_none_starts_within_a_fork(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    CHECK(server_before_fork(&server, false));
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, note_operations, NULL) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
    CHECK(thread_is_gone(&server.locked.worker));
    server_after_fork_in_parent(&server, true);
    launch();
    finish();
}

static void miss_and_wait(uint32_t size_class) {
    struct held held;
    obtain(0, &held, size_class, 2);
    give_up(0, &held);
    WAIT_UNTIL(prepared_blocks() > 0);
}

/* What it had prepared, and what was sent to it, is in the heap; later it starts again. */
static void test_ends_and_starts_again(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    for (int i = 0; i < 3; i++) {
        launch();
        miss_and_wait(4);
        struct held held;
        obtain(1, &held, 20, 0);
        give_up(1, &held);
        stop_server();
        CHECK(!server_serves(&server));
        CHECK_EQUAL(atomic_load(&heap.out), 0);
    }
    finish();
}

static void test_ends_with_the_process(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    launch();
    miss_and_wait(4);
    atomic_store(&server.words.thread, THREAD_ENDED);
    WAIT_UNTIL(server_stop(&server, 1));
    CHECK_EQUAL(atomic_load(&heap.out), 0);
    CHECK_EQUAL(atomic_load(&server.words.thread), THREAD_ENDED);
    note_operations(NULL);
    CHECK(thread_is_gone(&server.locked.worker));
}

static _Atomic(bool) stop;

static void *use_blocks(void *argument) {
    uint64_t random = seed + (uintptr_t)argument;
    struct held held[4] = {{0}};
    while (!atomic_load(&stop)) {
        struct held *one = &held[check_random(&random) % 4];
        if (one->count > 0) {
            give_up((unsigned)(uintptr_t)argument, one);
        } else {
            obtain((unsigned)(uintptr_t)argument, one, (uint32_t)(check_random(&random) % 9), 2);
        }
    }
    for (size_t i = 0; i < 4; i++) {
        give_up(0, &held[i]);
    }
    return NULL;
}

static pthread_t clients[CLIENTS];

static void start_clients(void) {
    atomic_store(&stop, false);
    for (uintptr_t i = 0; i < CLIENTS; i++) {
        CHECK(pthread_create(&clients[i], NULL, use_blocks, (void *)i) == 0);
    }
}

static void join_clients(void) {
    atomic_store(&stop, true);
    for (size_t i = 0; i < CLIENTS; i++) {
        CHECK(pthread_join(clients[i], NULL) == 0);
    }
}

static void test_ends_among_clients(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    for (uint64_t i = check_rounds(10); i > 0; i--) {
        launch();
        start_clients();
        check_nap(2000000);
        stop_server();
        join_clients();
    }
    finish();
}

/* ---- forks ---- */

/* Forks as the allocator does. Returns the child's number, or 0 in the child. */
static pid_t fork_with(bool held) {
    fflush(NULL);
    heap_before_fork();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        lock_ranks_after_fork();
    }
    heap_after_fork();
    if (child == 0) {
        server_start_child(&server, held);
    } else {
        server_after_fork_in_parent(&server, held);
    }
    return child;
}

static void await(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

/* In a child: it has no server, works itself, and gets a server of its own. Blocks that threads of the parent
 * held are out for good. */
static void live_as_child(size_t out) {
    start_threads_elsewhere();
    CHECK(!server_serves(&server));
    struct held held;
    CHECK(!ask(0, &held, 3, 0));
    server_flush(&server, 0); /* as the first operation of a child does */
    CHECK_EQUAL(prepared_blocks(), 0);
    if (out != SIZE_MAX) {
        CHECK_EQUAL(atomic_load(&heap.out), out);
    }
    size_t lost = atomic_load(&heap.out);
    launch();
    WAIT_UNTIL(ask(0, &held, 3, 0));
    give_up(0, &held);
    stop_server();
    server_flush(&server, LONG_TIMEOUT_NS);
    CHECK_EQUAL(atomic_load(&heap.out), lost);
    _exit(0);
}

static void test_fork(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    for (int i = 0; i < 5; i++) {
        miss_and_wait(4 + (uint32_t)i);
        bool held = server_before_fork(&server, false);
        CHECK(held);
        pid_t child = fork_with(held);
        if (child == 0) {
            live_as_child(0);
        }
        await(child);
    }
    CHECK(server_serves(&server));
    finish();
}

static void test_fork_without_a_server(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    bool held = server_before_fork(&server, false);
    pid_t child = fork_with(held);
    if (child == 0) {
        live_as_child(0);
    }
    await(child);
    launch();
    finish();
}

/* Within a fork, of the forking thread: a fork handler of the program's may allocate. */
static void test_blocks_within_a_fork(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    miss_and_wait(4);
    CHECK(server_before_fork(&server, false));
    struct held held;
    CHECK(!ask(0, &held, 4, 0));
    obtain(1, &held, 4, 0);
    CHECK(!give_up(1, &held));
    CHECK(server_is_held(&server));
    server_flush(&server, LONG_TIMEOUT_NS); /* which waits for nothing */
    server_after_fork_in_parent(&server, true);
    CHECK(!server_is_held(&server));
    finish();
}

static void test_forks_among_clients(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    start_clients();
    for (uint64_t i = check_rounds(20); i > 0; i--) {
        bool held = server_before_fork(&server, false);
        CHECK(held);
        pid_t child = fork_with(held);
        if (child == 0) {
            live_as_child(SIZE_MAX);
        }
        await(child);
    }
    join_clients();
    finish();
}

/* A signal handler that interrupted its thread within the heap waits for nothing; the child forgets what is
 * in endpoints, and nothing else. */
static void test_fork_by_a_handler_within_the_heap(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    miss_and_wait(4);
    CHECK(!server_before_fork(&server, true));
    pid_t child = fork_with(false);
    if (child == 0) {
        live_as_child(SIZE_MAX);
    }
    await(child);
    CHECK(server_serves(&server));
    finish();
}

/* The server is in the midst of its work, which it never ends in the child. */
static void test_fork_with_a_server_that_does_not_answer(void) {
    set_up(2, 0, 1000000);
    launch();
    gate_close();
    struct held held;
    WAIT_UNTIL((ask(0, &held, 5, 0), gate_has_waiter()));
    CHECK_EQUAL(held.count, 0);
    CHECK(!server_before_fork(&server, false)); /* after a tenth of a second */
    size_t out = atomic_load(&heap.out);
    pid_t child = fork_with(false);
    if (child == 0) {
        gate_open();
        live_as_child(out);
    }
    await(child);
    gate_open();
    finish();
}

/* A handler forks that interrupted its thread in an endpoint, and the thread goes on in the child. */
static void test_fork_within_an_endpoint(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    struct endpoint *endpoint = server_open(&server, 0);
    WAIT_UNTIL(endpoint_try(endpoint));
    bool held = server_before_fork(&server, false);
    CHECK(held);
    pid_t child = fork_with(held);
    CHECK(endpoint_is_mine(endpoint));
    endpoint_leave(endpoint);
    if (child == 0) {
        live_as_child(0);
    }
    await(child);
    finish();
}

/* A handler forks within a fork, and one whose thread serves in the server's place. */
static void test_nested_forks(void) {
    set_up(2, 4096, LONG_TIMEOUT_NS);
    launch();
    miss_and_wait(4);
    CHECK(server_before_fork(&server, false));
    CHECK(server_before_fork(&server, false));
    pid_t inner = fork_with(true);
    if (inner == 0) {
        server_after_fork_in_parent(&server, true); /* the outer fork ends here, too */
        live_as_child(0);
    }
    await(inner);
    CHECK(server_is_held(&server));
    pid_t outer = fork_with(true);
    if (outer == 0) {
        live_as_child(0);
    }
    await(outer);
    CHECK(!server_is_held(&server));
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    CHECK(server_before_fork(&server, true));
    pid_t child = fork_with(true);
    server_drain(&server, 1000);
    lock_release(&server.lock);
    if (child == 0) {
        live_as_child(0);
    }
    await(child);
    finish();
}

/* A handler forks whose thread waits for an answer: in the child the thread finds the call cancelled. */
static void test_fork_within_a_call(void) {
    set_up(2, 0, LONG_TIMEOUT_NS);
    struct call *call = call_claim(server.calls, 3);
    atomic_store(&call->state, CALL_PENDING | CALL_SLEEPING);
    struct call *done = call_claim(server.calls, 5);
    atomic_store(&done->state, CALL_DONE);
    struct call *others = call_claim(server.calls, 7);
    atomic_store(&others->claimer, 1);
    atomic_store(&others->state, CALL_DONE);
    struct call *abandoned = call_claim(server.calls, 9);
    atomic_store(&abandoned->state, CALL_ABANDONED);
    calls_start_child(server.calls);
    CHECK_EQUAL(atomic_load(&call->state), CALL_CLAIMED);
    CHECK(!call_begin(call) && !call_abandon(call) && !call_retract(call));
    CHECK_EQUAL(atomic_load(&done->state), CALL_DONE);
    CHECK_EQUAL(atomic_load(&others->state), CALL_FREE);
    CHECK_EQUAL(atomic_load(&abandoned->state), CALL_FREE);
}

int main(void) {
    seed = check_seed(1);
    in_child(test_starts_after_many_operations);
    in_child(test_a_refused_start_is_the_last);
    in_child(test_none_starts_while_starts_are_held);
    in_child(test_none_starts_within_a_fork);
    in_child(test_ends_and_starts_again);
    in_child(test_ends_with_the_process);
    in_child(test_ends_among_clients);
    in_child(test_fork);
    in_child(test_fork_without_a_server);
    in_child(test_blocks_within_a_fork);
    in_child(test_forks_among_clients);
    in_child(test_fork_by_a_handler_within_the_heap);
    in_child(test_fork_with_a_server_that_does_not_answer);
    in_child(test_fork_within_an_endpoint);
    in_child(test_nested_forks);
    in_child(test_fork_within_a_call);
    return 0;
}
