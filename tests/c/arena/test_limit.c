/* The limit on free memory, under either policy, however the memory came to be free. */
#include "arena/limit.h"

#include "whole_allocator.h"

static void test_paper_bound(void) {
    set("test_policy", "paper");
    uint64_t before = stats_now().purges_epoch; /* of the start, which has no test's clock */
    run_within(1, 1, 1);
    CHECK_EQUAL(stats_now().purges_epoch, before);
}

static void test_adaptive_bound(void) {
    run_within(1, UNTENDED, 1);
}

static void test_price(void) {
    set("test_policy", "paper");
    set("memory_per_cpu", "1");
    run_within(1, 1, 0.5);
    set("memory_per_cpu", "48");
    run_within(1, 1, 3);
    set("memory_per_cpu", "0");
    struct calm_stats stats = stats_now();
    check_limit(&stats, 0, 1, 0); /* a setting acts at once */
}

/* However they come to be free: also out of the caches, by a trim that would keep everything. */
static void test_bound_after_shedding(void) {
    for (int policy = 0; policy < 2; policy++) {
        set("test_policy", policy == 0 ? "paper" : "adaptive");
        for (size_t bytes = 16; bytes <= 32 * KIB; bytes *= 2) {
            size_t count = 0;
            for (size_t left = 2 * MIB; left > bytes && count < SLOTS; left -= bytes) {
                blocks[count++] = obtain(bytes);
            }
            while (count > 0) {
                calm_free(blocks[--count]);
                blocks[count] = NULL;
            }
        }
        calm_trim(SIZE_MAX);
        struct calm_stats stats = stats_now();
        printf("%s, after a trim that keeps all: %llu KiB dirty of %llu KiB\n",
               policy == 0 ? "paper" : "adaptive", (unsigned long long)stats.dirty >> 10,
               (unsigned long long)stats.dirty_limit >> 10);
        CHECK(stats.dirty <= stats.dirty_limit);
        calm_trim(0);
    }
}

/* Of the room that memory has, a third at most is for later. */
static void test_room(void) {
    build();
    free_all();
    clock_await_sleep(&calm_arenas.helper.wakeup);
    calm_arenas.machine.max_footprint = 30 * MIB;
    set("memory_per_cpu", "7"); /* looks anew */
    struct calm_stats stats = stats_now();
    CHECK_EQUAL(stats.dirty_limit, 10 * MIB);
    CHECK(stats.dirty <= stats.dirty_limit);
    calm_arenas.machine.max_footprint = 0;
    set("memory_per_cpu", "8");
    CHECK(stats_now().dirty <= MIN_LIMIT_PAGES * page_size);
}

int main(void) {
    prepare_governor();
    in_child(test_room);
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_paper_bound);
    in_child(test_adaptive_bound);
    in_child(test_price);
    in_child(test_bound_after_shedding);
    return 0;
}
