/* One heap, and what tests do to it by its functions alone: no locks, no arena. */
#ifndef CALM_TESTS_ONE_HEAP_H
#define CALM_TESTS_ONE_HEAP_H

#include "heap/large_blocks.h"
#include "heap/slab_blocks.h"
#include "heap/walk.h"
#include "os/purge.h"

#include <string.h>

#include "check.h"
#include "pages.h"

#define MIB        ((size_t)1 << 20)
#define HUGE_PAGES 16 /* in a huge-page region: no system's, but regions are many and small then */

static struct size_classes classes;
static struct heap heap;
static struct purge_batch batch;
static uint64_t random_state;
static size_t misuses_expected;
static bool colored; /* whether large blocks are spread by their colors */

static inline uint64_t next_random(void) {
    return check_random(&random_state);
}

static inline size_t below(size_t bound) {
    return next_random() % bound;
}

/* That no test has expected yet. */
static inline size_t new_misuses(void) {
    return heap.misuses - misuses_expected;
}

static inline enum misuse last_misuse(void) {
    return heap.misuse[(heap.misuses - 1) % MISUSE_RECORDS].kind;
}

static inline void expect_misuse(enum misuse kind, const void *pointer) {
    CHECK_EQUAL(new_misuses(), 1);
    CHECK_EQUAL(last_misuse(), kind);
    CHECK(heap.misuse[misuses_expected % MISUSE_RECORDS].pointer == pointer);
    misuses_expected++;
}

static inline bool start_heap(size_t address_space) {
    memset(&heap, 0, sizeof heap);
    misuses_expected = 0;
    colored = false;
    return heap_init(&heap, &classes, address_space);
}

static inline void end_heap(void) {
    struct space *space = &heap.space;
    span_table_release(&space->spans);
    for (size_t i = 0; i < PAGE_TABLES; i++) {
        address_range_release(&space->page_tables[i]);
    }
    for (size_t i = 0; i < atomic_load(&space->segments); i++) {
        address_range_release(&space->segment[i].region);
    }
}

static inline void purge_all(void) {
    while (heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT) > 0) {
        CHECK_EQUAL(purge_ranges(batch.ranges, batch.count).ranges_done, batch.count);
        heap_put_back(&heap, &batch);
    }
}

static inline char *take_pages(size_t pages, bool *zero) {
    char *block = heap_take_large(&heap, pages, 1, RUN_FOR_ANY, colored, zero);
    CHECK(block != NULL);
    return block;
}

static inline void put_pages(char *block) {
    CHECK(heap_put_large(&heap, block) == NULL);
}

enum { COLORS = 8 }; /* half of a huge-page region */

/* Blocks of huge-page regions are spread over the colors of a cache, of each of which it holds so many. */
static inline void spread(unsigned ways) {
    const struct hardware_cache cache = {.level = 2,
                                         .bytes = ways * COLORS * page_size,
                                         .ways = ways,
                                         .line_bytes = 64,
                                         .sets = COLORS * page_size / 64,
                                         .cpus = 1};
    colors_init(&heap.colors, &cache, 1, page_size, HUGE_PAGES * page_size, 0);
    colored = true;
}

/* What a test begins with. */
static inline void prepare_heaps(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    page_size = vm_page_size();
    size_classes_fill(&classes, page_size);
    random_state = check_seed(1);
}

#endif
