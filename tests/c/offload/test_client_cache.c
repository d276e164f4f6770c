/*
 * The client cache: a bounded stack of blocks, last in first out, whose bottom is taken if it was unused for
 * an epoch.
 */
#include "offload/client_cache.h"

#include "check.h"

#include <stdlib.h>
#include <string.h>

#define BLOCKS 3000

static struct size_classes classes;
static struct endpoint_layout layout;
static struct endpoint *endpoint;
static int memory[BLOCKS];
static void *blocks[BLOCKS];

static void set_up(size_t class_bytes) {
    size_classes_fill(&classes, 4096);
    layout = (struct endpoint_layout){.classes = &classes};
    client_cache_lay_out(&layout, class_bytes);
    free(endpoint);
    size_t bytes = sizeof *endpoint + layout.words * sizeof(uint64_t);
    endpoint = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    CHECK(endpoint != NULL);
    memset(endpoint, 0, bytes);
    endpoint->layout = &layout;
    for (size_t i = 0; i < BLOCKS; i++) {
        blocks[i] = &memory[i];
    }
}

static void push(uint32_t size_class, size_t first, size_t count) {
    CHECK(client_cache_push(endpoint, size_class, blocks + first, count));
}

/* The blocks come back from the last one on. */
static void check_pop(uint32_t size_class, size_t wanted, size_t first, size_t count) {
    void *got[MAX_MAGAZINE_BLOCKS] = {NULL};
    CHECK_EQUAL(client_cache_pop(endpoint, size_class, got, wanted), count);
    for (size_t i = 0; i < count; i++) {
        CHECK(got[i] == blocks[first + i]);
    }
}

static void check_unwanted(uint32_t size_class, size_t first, size_t count) {
    void *got[MAX_MAGAZINE_BLOCKS];
    CHECK_EQUAL(client_cache_take_unused(endpoint, size_class, got), count);
    for (size_t i = 0; i < count; i++) {
        CHECK(got[i] == blocks[first + i]);
    }
}

static void test_last_in_first_out(void) {
    set_up(CLIENT_CACHE_CLASS_BYTES);
    check_pop(1, 8, 0, 0);
    push(1, 0, 10);
    push(1, 10, 20);
    CHECK_EQUAL(client_cache_level(endpoint, 1), 30);
    check_pop(1, 5, 25, 5);
    check_pop(1, 20, 5, 20);
    check_pop(2, 1, 0, 0);
    check_pop(1, 20, 0, 5);
    CHECK_EQUAL(client_cache_level(endpoint, 1), 0);
}

/* Each class has so many bytes, or blocks, and a place of its own. */
static void test_bounds(void) {
    set_up(CLIENT_CACHE_CLASS_BYTES);
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        size_t most = layout.max_cached[size_class];
        CHECK(most * classes.of[size_class].size <= CLIENT_CACHE_CLASS_BYTES);
        CHECK(most == 1024 || (most + 1) * classes.of[size_class].size > CLIENT_CACHE_CLASS_BYTES);
        for (size_t i = 0; i < most; i++) {
            push(size_class, size_class + i, 1);
        }
        CHECK(!client_cache_push(endpoint, size_class, blocks, 1));
    }
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        for (size_t left = layout.max_cached[size_class]; left > 0; left--) {
            check_pop(size_class, 1, size_class + left - 1, 1);
        }
    }
    /* What has no room as a whole is left as it is. */
    push(1, 0, 1000);
    CHECK(!client_cache_push(endpoint, 1, blocks, 25));
    CHECK_EQUAL(client_cache_level(endpoint, 1), 1000);
    push(1, 1000, 24);
}

static void test_none(void) {
    set_up(0);
    for (uint32_t size_class = 1; size_class < classes.count; ++size_class) {
        CHECK(!client_cache_push(endpoint, size_class, blocks, 1));
        check_pop(size_class, 1, 0, 0);
    }
}

/* At an epoch's end those blocks are unwanted that stayed in the cache all the time. */
static void test_unwanted(void) {
    set_up(CLIENT_CACHE_CLASS_BYTES);
    push(3, 0, 100);
    check_unwanted(3, 0, 0); /* it came in this epoch; the next one begins */
    check_pop(3, 60, 40, 60);
    push(3, 200, 30);
    check_unwanted(3, 0, 40);
    check_unwanted(3, 0, 0);
    check_pop(3, 100, 200, 30);
}

/* No more than a magazine at a time, the oldest first. */
static void test_unwanted_magazines(void) {
    set_up(CLIENT_CACHE_CLASS_BYTES);
    size_t count = 2 * MAX_MAGAZINE_BLOCKS + 7;
    push(2, 0, count);
    check_unwanted(2, 0, 0);
    check_unwanted(2, 0, MAX_MAGAZINE_BLOCKS);
    check_unwanted(2, MAX_MAGAZINE_BLOCKS, MAX_MAGAZINE_BLOCKS);
    check_unwanted(2, 2 * MAX_MAGAZINE_BLOCKS, 7);
    check_unwanted(2, 0, 0);
    CHECK_EQUAL(client_cache_level(endpoint, 2), 0);
}

int main(void) {
    test_last_in_first_out();
    test_bounds();
    test_none();
    test_unwanted();
    test_unwanted_magazines();
    return 0;
}
