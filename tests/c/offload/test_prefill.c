/* What is prepared for clients: within bounds, what they take next, and back in the heap once unused. */
#include "fake_heap.h"

#include "os/vm.h"

/* Serves and prefills as the server does, without its thread. */
static void serve_all(void) {
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    while (server_serve(&server) | prefill_one(&server)) {
    }
    lock_release(&server.lock);
}

static void end_epoch(void) {
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    prefill_end_epoch(&server, server_endpoint(&server, 0));
    lock_release(&server.lock);
}

/* A client's call, which this thread serves itself. */
static void call_for(uint32_t size_class, size_t pages) {
    struct request request = {.size_class = size_class, .pages = pages, .align_pages = 1};
    CHECK(server_enter(&server, LONG_TIMEOUT_NS, false));
    prefill_missed(&server, server_endpoint(&server, 0), &request);
    lock_release(&server.lock);
}

static void set_up_serving(size_t cache_bytes) {
    set_up(1, cache_bytes, 1); /* a client that misses does not wait */
    atomic_store(&server.words.serves, true);
}

static void end(void) {
    atomic_store(&server.words.serves, false);
    server_flush(&server, LONG_TIMEOUT_NS);
    CHECK_EQUAL(atomic_load(&heap.out), 0);
}

static void test_a_miss_is_followed_by_hits(void) {
    set_up_serving(0);
    call_for(3, 0);
    call_for(0, 5);
    serve_all();
    struct held held[3];
    CHECK(ask(0, &held[0], 3, 0) && ask(0, &held[1], 3, 0) && ask(0, &held[2], 0, 5));
    CHECK_EQUAL(client_counts(&server).hits, 3);
    CHECK_EQUAL(held[0].count, classes.of[3].batch);
    for (size_t i = 0; i < 3; i++) {
        give_up(0, &held[i]);
    }
    end();
}

/* Whatever is missed, and however often. */
static void test_bounds(void) {
    set_up_serving(0);
    for (int round = 0; round < 12; round++) {
        for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
            call_for(size_class, 0);
        }
        for (size_t pages = 9; pages < 400; pages += 7) {
            call_for(0, pages);
        }
        serve_all();
        struct endpoint *endpoint = server_endpoint(&server, 0);
        size_t charge = 0;
        for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
            uint32_t level = prefill_queue_level(endpoint, size_class);
            CHECK(level <= server.setup.layout.queues[size_class].max_ready);
            charge += (level > 0 ? level - 1 : 0) * prefill_queue_charge(&classes.of[size_class]);
        }
        for (uint32_t queue = SIZE_CLASSES; queue < QUEUES; queue++) {
            uint32_t level = prefill_queue_level(endpoint, queue);
            CHECK(level <= LARGE_QUEUE_BLOCKS);
            charge += level * atomic_load(&endpoint->large_pages[queue - SIZE_CLASSES]) * vm_page_size();
        }
        CHECK(charge <= MAX_PREFILL_BYTES);
        size_t bytes, max_bytes;
        CHECK(prefill_blocks(&server, &bytes) <= prefill_max_blocks(&server, &max_bytes));
        CHECK(bytes > 0 && bytes <= max_bytes);
    }
    end();
}

static void test_unused_blocks_go_back(void) {
    set_up_serving(0);
    for (int i = 0; i < 5; i++) {
        call_for(3, 0);
        call_for(0, 4);
    }
    serve_all();
    CHECK(prepared_blocks() > 0);
    for (int epoch = 0; epoch < 8; epoch++) {
        end_epoch();
        serve_all();
    }
    CHECK_EQUAL(prepared_blocks(), 0);
    CHECK_EQUAL(atomic_load(&heap.out), 0);
    CHECK(atomic_load(&server.counts.prefill_unused) > 0);
}

/* Each block that a client freed and none took since an epoch ago. */
static void test_unused_client_caches_go_back(void) {
    set_up_serving(64 << 10);
    struct held held[2];
    obtain(0, &held[0], 3, 0);
    obtain(0, &held[1], 3, 0);
    CHECK(give_up(0, &held[0]) && give_up(0, &held[1]));
    CHECK(prepared_blocks() > 0);
    CHECK(ask(0, &held[0], 3, 0)); /* freed last, served first, without a message */
    CHECK_EQUAL(client_counts(&server).hits, 0);
    CHECK(give_up(0, &held[0]));
    end_epoch();
    end_epoch();
    end_epoch();
    CHECK_EQUAL(prepared_blocks(), 0);
    CHECK_EQUAL(atomic_load(&heap.out), 0);
}

/* A block of another size with the same queue waits until the queue's own is not wanted. */
static void test_a_queue_changes_its_size(void) {
    set_up_serving(0);
    call_for(0, 4);
    serve_all();
    struct held held;
    CHECK(ask(0, &held, 0, 4));
    give_up(0, &held);
    call_for(0, 4 + LARGE_QUEUES);
    serve_all();
    end_epoch();
    call_for(0, 4 + LARGE_QUEUES);
    call_for(0, 4 + LARGE_QUEUES);
    serve_all();
    CHECK(ask(0, &held, 0, 4 + LARGE_QUEUES));
    give_up(0, &held);
    end();
}

static void test_short_of_memory(void) {
    set_up_serving(0);
    call_for(3, 0);
    call_for(0, 4);
    atomic_store(&heap.is_short, true);
    serve_all();
    CHECK_EQUAL(prepared_blocks(), 0);
    atomic_store(&heap.is_short, false);
    end();
}

/* A flush leaves out an endpoint in which a thread stays. */
static void test_flush_beside_a_client(void) {
    set_up_serving(0);
    call_for(3, 0);
    serve_all();
    struct endpoint *endpoint = server_endpoint(&server, 0);
    CHECK(endpoint_try(endpoint));
    atomic_store(&endpoint->entered, 8); /* another thread */
    server_flush(&server, LONG_TIMEOUT_NS);
    CHECK(prepared_blocks() > 0);
    endpoint_leave(endpoint);
    end();
}

int main(void) {
    in_child(test_a_miss_is_followed_by_hits);
    in_child(test_bounds);
    in_child(test_unused_blocks_go_back);
    in_child(test_unused_client_caches_go_back);
    in_child(test_a_queue_changes_its_size);
    in_child(test_short_of_memory);
    in_child(test_flush_beside_a_client);
    return 0;
}
