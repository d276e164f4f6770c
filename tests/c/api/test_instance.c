/* The tables of small sizes: coarse for a small program, then fine; and the switch of the fast path. */
#include "api/instance.h"

#include "calmalloc.h"

#include "check.h"

#include <string.h>
#include <unistd.h>

static size_t usable_of(size_t bytes) {
    void *block = calm_malloc(bytes);
    CHECK(block != NULL);
    size_t usable = calm_malloc_usable_size(block);
    calm_free(block);
    return usable;
}

/* A second magazine on one CPU is enough, and no more blocks are needed than all CPUs' first ones. */
static void test_growing_program(void) {
    CHECK_EQUAL(usable_of(20), 64);
    CHECK_EQUAL(usable_of(100), 256);
    size_t most = (size_t)(sysconf(_SC_NPROCESSORS_CONF) + 1) * MAX_CACHE_BLOCKS;
    size_t count = 0;
    while (small_sizes_are_coarse(calm_all_classes.small)) {
        CHECK(count++ < most && calm_malloc(64) != NULL);
    }
    CHECK(count > 0);
    CHECK_EQUAL(usable_of(20), 32);
    CHECK_EQUAL(usable_of(100), 112);
    CHECK(memcmp(calm_classes.small, calm_all_classes.small, SMALL_SIZES) == 0);
}

static void test_switched_off(void) {
    static const uint8_t none[SMALL_SIZES];
    CHECK_EQUAL(usable_of(20), 64);
    allocator_use_fast_path(false);
    CHECK(memcmp(calm_classes.small, none, SMALL_SIZES) == 0);
    CHECK_EQUAL(usable_of(20), 64);
    allocator_refine_classes();
    CHECK(memcmp(calm_classes.small, none, SMALL_SIZES) == 0);
    allocator_use_fast_path(true);
    CHECK_EQUAL(usable_of(20), 32);
    CHECK(memcmp(calm_classes.small, calm_all_classes.small, SMALL_SIZES) == 0);
}

/* A fork while another thread refines leaves the child with a part of it. */
static void test_half_refined(void) {
    CHECK_EQUAL(usable_of(20), 64);
    uint8_t coarse[SMALL_SIZES];
    memcpy(coarse, calm_classes.small, SMALL_SIZES);
    for (size_t done = 0; done <= 2 * (size_t)SMALL_SIZES; done += 13) {
        memcpy(calm_all_classes.small, coarse, SMALL_SIZES);
        memcpy(calm_classes.small, coarse, SMALL_SIZES);
        uint8_t fine[SMALL_SIZES];
        memcpy(fine, coarse, SMALL_SIZES);
        small_sizes_refine(fine);
        for (size_t i = 0; i < done; i++) { /* in the order of refinement */
            uint8_t *table = i < SMALL_SIZES ? calm_all_classes.small : calm_classes.small;
            size_t at = SMALL_SIZES - 1 - i % SMALL_SIZES;
            table[at] = fine[at];
        }
        allocator_refine_classes();
        CHECK(memcmp(calm_all_classes.small, fine, SMALL_SIZES) == 0);
        CHECK(memcmp(calm_classes.small, fine, SMALL_SIZES) == 0);
    }
}

int main(void) {
    in_child(test_growing_program);
    in_child(test_switched_off);
    in_child(test_half_refined);
    return 0;
}
