/* Free runs: which one a block gets, in small pages and in huge-page regions. */
#include "heap/runs.h"

#include "heap/marks.h"
#include "one_heap.h"

/* Runs of nearly the same length share a bin, of which only the lowest run is looked at: that must not hide
 * the run that was just made for a block. */
static void test_new_run_of_a_bin_that_is_in_use(void) {
    enum { SHORTER = 2900, LONGER = 3000 }; /* more than a space grows by otherwise */
    CHECK(start_heap((size_t)1 << 40));
    bool zero;
    char *shorter = take_pages(SHORTER, &zero);
    take_pages(1, &zero);
    size_t usable = heap.space.segment[0].region.committed / page_size;
    if (usable > SHORTER + 1) {
        take_pages(usable - SHORTER - 1, &zero);
    }
    put_pages(shorter);
    purge_all();
    char *longer = take_pages(LONGER, &zero);
    CHECK_EQUAL(heap_large_span(&heap, longer)->pages, LONGER);
    heap_walk(&heap, NULL, 0);
    end_heap();
}

/* What is resident is used, even where it takes clean pages beside it to be long enough; unless it is too
 * little. */
static void test_short_runs_are_extended(void) {
    for (int dirty_first = 0; dirty_first < 2; dirty_first++) {
        CHECK(start_heap((size_t)1 << 40));
        bool zero;
        char *first = take_pages(64, &zero);
        char *second = take_pages(64, &zero);
        take_pages(1, &zero); /* keeps them apart from the rest */
        CHECK(second == first + 64 * page_size);
        char *clean = dirty_first ? second : first;
        char *dirty = dirty_first ? first : second;
        put_pages(clean);
        purge_all();
        put_pages(dirty);
        size_t before = heap_dirty_pages(&heap);
        CHECK_EQUAL(before, 64);

        size_t faulted = heap.runs.faulted_pages;
        char *longer = take_pages(100, &zero);
        CHECK(longer == (dirty_first ? first : second - 36 * page_size));
        CHECK(!zero);
        CHECK_EQUAL(heap_dirty_pages(&heap), 0);
        CHECK_EQUAL(heap.runs.faulted_pages - faulted, 36);
        put_pages(longer);
        purge_all();

        char *all = take_pages(128, &zero);
        CHECK(all == first && zero);
        char *part = take_pages(20, &zero);
        char *after = take_pages(200, &zero);
        take_pages(1, &zero);
        put_pages(after);
        purge_all();
        put_pages(part);
        CHECK(heap_take_large(&heap, SIZE_MAX / page_size, 1, RUN_FOR_ANY, colored, &zero) == NULL);
        char *elsewhere = take_pages(210, &zero);
        CHECK(zero && elsewhere != part);
        CHECK_EQUAL(heap_dirty_pages(&heap), 20);
        end_heap();
    }
}

/* ---- huge-page regions ---- */

/* A block of exactly a huge-page region, or more, that would have one. */
static char *take_dense(size_t pages, size_t align_pages, enum run_choice choice) {
    bool zero;
    char *block = heap_take_large(&heap, pages, align_pages, choice, colored, &zero);
    CHECK(block != NULL);
    CHECK_EQUAL(heap_large_span(&heap, block)->pages, pages);
    heap_walk(&heap, NULL, 0);
    return block;
}

static size_t color_of(const char *block) {
    return (uintptr_t)block / page_size % COLORS;
}

/* Two free runs in huge-page regions, both of which begin at the first color: of one region, and of two. */
static void leave_huge_runs(char **one, char **two) {
    char *blocks[4];
    colored = false;
    for (size_t i = 0; i < 4; i++) {
        blocks[i] = take_dense(i == 2 ? 2 * HUGE_PAGES : HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES);
        CHECK(heap_large_span(&heap, blocks[i])->huge);
        CHECK_EQUAL(color_of(blocks[i]), 0);
    }
    *one = blocks[0];
    *two = blocks[2];
    put_pages(*one);
    put_pages(*two);
    colored = true;
}

static void test_huge_runs_are_chosen_by_color(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    spread(1);
    char *one;
    char *two;
    leave_huge_runs(&one, &two);
    size_t regions = heap.runs.regions;
    /* Best fit, while there is room for its color. */
    CHECK(take_dense(HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES) == one);
    put_pages(one);
    /* One that is long enough to begin at another, once there is none; and no new region. */
    bool zero;
    colors_add(&heap.colors, 0);
    char *moved = heap_take_large(&heap, HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES, colored, &zero);
    CHECK(moved == two + page_size);
    CHECK_EQUAL(heap.runs.regions, regions);
    put_pages(moved);
    /* What would have huge pages only where nothing else is resident: at whatever color, where it must. */
    char *any = heap_take_large(&heap, HUGE_PAGES, 1, RUN_FOR_LARGE, colored, &zero);
    CHECK(any == one);
    put_pages(any);
    /* And what is aligned stays so. */
    char *aligned = heap_take_large(&heap, HUGE_PAGES, HUGE_PAGES, RUN_FOR_HUGE_PAGES, colored, &zero);
    CHECK(aligned != NULL && (uintptr_t)aligned % (HUGE_PAGES * page_size) == 0);
    put_pages(aligned);
    colors_remove(&heap.colors, 0);
    heap_walk(&heap, NULL, 0);
    end_heap();
}

/* No more regions than a block and the pages before it take. */
static void test_new_regions_are_few(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    spread(1);
    char *first = take_dense(HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES);
    CHECK_EQUAL(color_of(first), 0);
    CHECK_EQUAL(heap.runs.regions, 1);
    char *second = take_dense(2 * HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES);
    CHECK_EQUAL(color_of(second), 1);
    CHECK_EQUAL(heap.runs.regions, 4);
    char *third = take_dense(2 * HUGE_PAGES - 2, 1, RUN_FOR_HUGE_PAGES);
    CHECK_EQUAL(color_of(third), 2);
    CHECK_EQUAL(heap.runs.regions, 6);
    end_heap();
}

/* A block for whose pages the program requested huge ones leaves whole regions, and usual pages at both ends;
 * purged, they are of use for everything again, before address space is. */
static void test_requested_huge_pages(void) {
    static char *others[4096];
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    colored = false;
    for (int round = 0; round < 3; round++) {
        char *before = take_dense(3, 1, RUN_FOR_ANY);
        char *block = take_dense(5 * HUGE_PAGES, 1, RUN_FOR_LARGE);
        size_t skip;
        size_t whole = runs_whole_regions(&heap.runs, heap_large_span(&heap, block), &skip);
        CHECK(whole >= 4 * HUGE_PAGES);
        marks_request_huge_pages(&heap, block, 5 * HUGE_PAGES * page_size);
        put_pages(block);
        heap_walk(&heap, NULL, 0);
        CHECK_EQUAL(heap.runs.sets[RUN_HUGE_DIRTY].pages, whole);
        CHECK_EQUAL(heap.runs.regions, whole / HUGE_PAGES);
        purge_all();
        CHECK_EQUAL(heap.runs.sets[RUN_HUGE_CLEAN].pages, whole);
        size_t usable = heap.space.segment[0].region.committed;
        size_t count = 0;
        while (heap.runs.regions > 0) {
            others[count++] = take_dense(2 * HUGE_PAGES, 1, RUN_FOR_ANY);
            CHECK_EQUAL(heap.space.segment[0].region.committed, usable);
        }
        CHECK(!heap_large_span(&heap, others[count - 1])->huge);
        while (count > 0) {
            put_pages(others[--count]);
        }
        put_pages(before);
        purge_all();
        heap_walk(&heap, NULL, 0);
    }
    end_heap();
}

/* Where all colors are full, none is better, and blocks have huge pages as ever. */
static void test_full_colors(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    spread(1);
    for (size_t i = 0; i < COLORS; i++) {
        take_dense(HUGE_PAGES, 1, RUN_FOR_HUGE_PAGES);
    }
    purge_all();
    size_t regions = heap.runs.regions;
    for (size_t i = 1; i <= 3; i++) {
        char *block = take_dense(2 * HUGE_PAGES + 1, 1, RUN_FOR_HUGE_PAGES);
        CHECK(heap_large_span(&heap, block)->huge);
        CHECK(heap.runs.regions <= regions + 3 * i);
    }
    end_heap();
}

/* Among blocks of less than a huge page, the pages left out would fit nothing. */
static void test_smaller_blocks_are_not_spread(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    spread(1);
    for (size_t i = 0; i < 3; i++) {
        char *block = take_dense(HUGE_PAGES - 1, 1, RUN_FOR_HUGE_PAGES);
        CHECK(heap_large_span(&heap, block)->huge && !heap_large_span(&heap, block)->colored);
        CHECK_EQUAL(heap.runs.regions, i + 1);
    }
    end_heap();
}

/* Small pages have no color that anybody knows. */
static void test_small_pages_are_not_spread(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    spread(1);
    char *block = take_dense(HUGE_PAGES, 1, RUN_FOR_ANY);
    CHECK(!heap_large_span(&heap, block)->huge && !heap_large_span(&heap, block)->colored);
    put_pages(block);
    purge_all();
    colors_add(&heap.colors, (uintptr_t)block / page_size);
    bool zero;
    CHECK(heap_take_large(&heap, HUGE_PAGES, 1, RUN_FOR_ANY, colored, &zero) == block);
    end_heap();
}

int main(void) {
    prepare_heaps();
    test_new_run_of_a_bin_that_is_in_use();
    test_short_runs_are_extended();
    test_huge_runs_are_chosen_by_color();
    test_new_regions_are_few();
    test_requested_huge_pages();
    test_full_colors();
    test_smaller_blocks_are_not_spread();
    test_small_pages_are_not_spread();
    return 0;
}
