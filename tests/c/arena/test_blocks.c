/* Small blocks between the caches, the depots and the heap. */
#include "arena/blocks.h"

#include "whole_allocator.h"

#include <pthread.h>
#include <sched.h>

/* Of so many new blocks: those that begin in pages that are not resident. */
static size_t untouched_blocks(size_t count, size_t bytes) {
    size_t untouched = 0;
    for (size_t i = 0; i < count; i++) {
        char *block = calm_malloc(bytes);
        CHECK(block != NULL);
        char *page = (char *)((uintptr_t)block & ~(page_size - 1));
        untouched += resident_pages(page, page_size) == 0;
    }
    return untouched;
}

/*
 * A program that first reads a new block finds its page written already, so that its own write copies no zero
 * page; but not while it uses little, since then the pages of a magazine that it never uses would count.
 */
static void test_new_pages_touched(void) {
    if (!residency_is_told()) {
        return;
    }
    CHECK(cpu_pin((unsigned)sched_getcpu())); /* another CPU's cache may have a block from before */
#ifndef CALM_ASSERTIONS                       /* with which new blocks are filled */
    CHECK(untouched_blocks(100, page_size / 4 * 3) > 0);
#endif
    obtain(20 * MIB);
    untouched_blocks(1000, page_size / 4 * 3); /* the rest of the caches' blocks */
    /* Of several pages' blocks, one may begin in the page in which the block before it ends. */
    CHECK_EQUAL(untouched_blocks(1000, page_size / 4 * 3), 0);
    CHECK_EQUAL(untouched_blocks(1000, page_size / 4 * 5), 0);
}

/* For medium blocks. */
static size_t depot_bounds(size_t *most) {
    size_t sum = 0;
    *most = 0;
    for (unsigned i = 0; i < calm_arenas.depot_count; i++) {
        sum += atomic_load(&calm_arenas.depots[i].medium.bound);
        *most += calm_arenas.depots[i].medium.max_bound;
    }
    return sum;
}

/* What is freed all at once, and taken again, stays in the depot: even all that there is. */
static void test_depot_grows(void) {
    enum { BLOCKS = 300, BYTES = 4096 };
    size_t most;
    size_t least = depot_bounds(&most);
    uint64_t locks[2];
    for (int half = 0; half < 2; half++) {
        uint64_t before = stats_now().heap_locks;
        for (int turn = 0; turn < 200; turn++) {
            for (size_t i = 0; i < BLOCKS; i++) {
                blocks[i] = obtain(BYTES);
            }
            for (size_t i = 0; i < BLOCKS; i++) {
                calm_free(blocks[i]);
                blocks[i] = NULL;
            }
        }
        locks[half] = stats_now().heap_locks - before;
        struct calm_stats stats = stats_now();
        CHECK(stats.cached <= stats.cached_limit);
    }
    size_t grown = depot_bounds(&most);
    printf("depot: %zu KiB, %zu once grown; %llu trips to the heap, then %llu\n", least / KIB, grown / KIB,
           (unsigned long long)locks[0], (unsigned long long)locks[1]);
    CHECK(grown > least && grown <= most);
    CHECK(locks[1] < locks[0] / 2);
}

/* Where CPUs have several depots, what one of them holds is taken before the heap is asked. */
static void test_depots_of_other_cpus(void) {
    enum { BLOCKS = 64, BYTES = 4096 };
    static struct arenas arenas;
    CHECK(arena_init(&arenas, &calm_all_classes, calm_arenas.caches, (size_t)1 << 30, true, NULL));
    CHECK(arenas.depot_count >= 1 && arenas.depot_count <= MAX_DEPOTS);
    for (unsigned i = arenas.depot_count; i < 3; i++) { /* as if there were 12 CPUs */
        CHECK(depot_init(&arenas.depots[i], &calm_all_classes, DEPOT_BIN_BLOCKS, MIB, MIB, MIB));
    }
    arenas.depot_count = arenas.depots_per_node = 3;
    uint32_t size_class = size_class_of(&calm_all_classes, BYTES);
    void *taken[BLOCKS];
    CHECK_EQUAL(arena_take_blocks(&arenas, size_class, taken, BLOCKS), BLOCKS);
    size_t each = calm_all_classes.of[size_class].batch;
    for (unsigned i = 0; i < 3; i++) {
        CHECK(depot_put(&arenas.depots[i], size_class, taken + i * each, each));
    }
    uint64_t locks = arenas.of[0].heap_locks;
    bool seen[BLOCKS] = {false};
    for (unsigned i = 0; i < 3; i++) {
        void *again[BLOCKS];
        CHECK_EQUAL(arena_take_blocks(&arenas, size_class, again, each), each);
        for (size_t k = 0; k < each; k++) {
            size_t at = 0;
            while (at < 3 * each && taken[at] != again[k]) {
                at++;
            }
            CHECK(at < 3 * each && !seen[at]);
            seen[at] = true;
        }
    }
    CHECK_EQUAL(arenas.of[0].heap_locks, locks);
    CHECK_EQUAL(arena_take_blocks(&arenas, size_class, taken, 1), 1);
    CHECK_EQUAL(arenas.of[0].heap_locks, locks + 1);
}

enum { MISSING_THREADS = 4 * MISS_COUNTERS, MISSES_EACH = 2000 };

static void *miss(void *unused) {
    uint32_t size_class = size_class_of(calm_arenas.of[0].heap.classes, 64);
    void *block;
    for (size_t i = 0; i < MISSES_EACH / 2; i++) {
        CHECK_EQUAL(arena_take_blocks(&calm_arenas, size_class, &block, 1), 1);
        arena_put_blocks(&calm_arenas, size_class, &block, 1);
    }
    return unused;
}

/* More threads than counters: of those that share one, none loses what another counted. */
static void test_misses_of_many_threads(void) {
    calm_free(obtain(1));
    uint64_t before = arena_cache_misses(&calm_arenas);
    pthread_t threads[MISSING_THREADS];
    for (size_t i = 0; i < MISSING_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, miss, NULL) == 0);
    }
    for (size_t i = 0; i < MISSING_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(arena_cache_misses(&calm_arenas) - before, MISSING_THREADS * MISSES_EACH);
}

int main(void) {
    prepare_governor();
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_new_pages_touched);
    in_child(test_depot_grows);
    in_child(test_depots_of_other_cpus);
    in_child(test_misses_of_many_threads);
    return 0;
}
