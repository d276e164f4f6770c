/* Small blocks: put back by a plan that was made without the heap's lock, and of pages made resident ahead.
 */
#include "heap/slab_blocks.h"

#include "heap/slab.h"
#include "one_heap.h"

#include <sys/prctl.h>

static void put_planned(void *const *blocks, size_t count, struct heap_puts *puts) {
    heap_put_planned(&heap, puts, blocks, count);
    heap_walk(&heap, NULL, 0);
}

/* Blocks of many slabs, in no order, are more than a plan has room for. */
static void test_plan_of_many_slabs(void) {
    enum { BLOCKS = 20000, AT_ONCE = 129 };
    static void *all[BLOCKS];
    CHECK(start_heap((size_t)1 << 40));
    uint32_t size_class = size_class_of(&classes, 500);
    CHECK_EQUAL(heap_take_blocks(&heap, size_class, all, BLOCKS), BLOCKS);
    for (size_t i = BLOCKS - 1; i > 0; i--) {
        size_t other = below(i + 1);
        void *block = all[i];
        all[i] = all[other];
        all[other] = block;
    }
    for (size_t i = 0; i < BLOCKS; i += AT_ONCE) {
        struct heap_puts puts;
        size_t count = BLOCKS - i < AT_ONCE ? BLOCKS - i : AT_ONCE;
        heap_plan_puts(&heap, &puts, all + i, count);
        CHECK(puts.planned < count || count < AT_ONCE);
        put_planned(all + i, count, &puts);
    }
    CHECK_EQUAL(new_misuses(), 0);
    CHECK_EQUAL(heap_used_pages(&heap), 0);
    end_heap();
}

/* Neighbours are one entry of a plan, however many they are: also where some stay in use. */
static void test_plan_of_neighbours(void) {
    enum { BLOCKS = 64 };
    void *all[BLOCKS];
    for (uint32_t size_class = 1; size_class < classes.count; size_class++) {
        CHECK(start_heap((size_t)1 << 40));
        CHECK_EQUAL(heap_take_blocks(&heap, size_class, all, BLOCKS), BLOCKS);
        size_t slabs = (BLOCKS + classes.of[size_class].slab_blocks - 1) / classes.of[size_class].slab_blocks;
        void *half[BLOCKS];
        size_t count = 0;
        for (size_t i = below(2); i < BLOCKS; i += 2) {
            half[count++] = all[i];
            all[i] = NULL;
        }
        struct heap_puts puts;
        heap_plan_puts(&heap, &puts, half, count);
        CHECK(puts.planned == count ? puts.count <= slabs : puts.count == MAX_HEAP_PUTS);
        put_planned(half, count, &puts);
        count = 0;
        for (size_t i = 0; i < BLOCKS; i++) {
            half[count] = all[i];
            count += all[i] != NULL;
        }
        heap_put_blocks(&heap, half, count);
        CHECK_EQUAL(new_misuses(), 0);
        CHECK_EQUAL(heap_used_pages(&heap), 0);
        end_heap();
    }
}

/* Of a block that is freed twice, each time by a thread that planned it while it was in use. */
static void test_plan_that_fails(void) {
    CHECK(start_heap((size_t)1 << 40));
    uint32_t size_class = size_class_of(&classes, page_size / 64);
    enum { BLOCKS = 256 }; /* of four pages */
    void *all[BLOCKS];
    CHECK_EQUAL(heap_take_blocks(&heap, size_class, all, BLOCKS), BLOCKS);
    struct heap_puts puts;

    /* Its neighbours are freed all the same. */
    void *some[] = {all[0], all[1], all[2], (char *)all[3] + 8, all[4], all[4], NULL};
    heap_plan_puts(&heap, &puts, some, 3);
    heap_put_blocks(&heap, &some[1], 1);
    put_planned(some, 3, &puts);
    expect_misuse(MISUSE_DOUBLE_FREE, some[1]);
    heap_plan_puts(&heap, &puts, some + 3, 1);
    put_planned(some + 3, 1, &puts);
    expect_misuse(MISUSE_INVALID_FREE, some[3]);
    heap_plan_puts(&heap, &puts, some + 4, 2);
    put_planned(some + 4, 2, &puts);
    expect_misuse(MISUSE_DOUBLE_FREE, some[4]);
    heap_plan_puts(&heap, &puts, some + 6, 1);
    put_planned(some + 6, 1, &puts);
    expect_misuse(MISUSE_INVALID_FREE, NULL);

    /* Its slab is gone; and its pages are of another class. */
    void *last = all[BLOCKS - 1];
    heap_plan_puts(&heap, &puts, &last, 1);
    heap_put_blocks(&heap, all + 3, 1);
    heap_put_blocks(&heap, all + 5, BLOCKS - 5);
    CHECK_EQUAL(heap_used_pages(&heap), 0);
    put_planned(&last, 1, &puts);
    expect_misuse(MISUSE_DOUBLE_FREE, last);
    void *others[BLOCKS];
    for (uint32_t other = size_class + 1; other < size_class + 9; other++) {
        CHECK_EQUAL(heap_take_blocks(&heap, size_class, all, BLOCKS), BLOCKS);
        void *second = all[BLOCKS - 2]; /* the lowest are the last; nothing of the other class begins there */
        heap_plan_puts(&heap, &puts, &second, 1);
        heap_put_blocks(&heap, all, BLOCKS);
        CHECK_EQUAL(heap_take_blocks(&heap, other, others, BLOCKS), BLOCKS);
        CHECK(space_span_of(&heap.space, space_page(&heap.space, second)) == puts.of[0].slab);
        put_planned(&second, 1, &puts);
        expect_misuse(MISUSE_INVALID_FREE, second);
        heap_put_blocks(&heap, others, BLOCKS);
        CHECK_EQUAL(new_misuses(), 0);
    }
    CHECK_EQUAL(heap_used_pages(&heap), 0);

    /* A purge has it. */
    CHECK_EQUAL(heap_take_blocks(&heap, size_class, all, BLOCKS), BLOCKS);
    heap_put_blocks(&heap, all, BLOCKS - 1);
    CHECK(heap_take_dirty(&heap, &batch, 64, PURGE_SLABS) > 0);
    size_t claimed = 0;
    for (size_t i = 0; i < BLOCKS - 1; i++) {
        heap_plan_puts(&heap, &puts, &all[i], 1);
        if (puts.of[0].slab != NULL &&
            slab_has(puts.of[0].slab, puts.of[0].word * 64 + (size_t)__builtin_ctzll(puts.of[0].bits))) {
            heap_put_planned(&heap, &puts, &all[i], 1);
            expect_misuse(MISUSE_DOUBLE_FREE, all[i]);
            claimed++;
        }
    }
    CHECK(claimed > 0 || page_size > 4096); /* or the slab has one page */
    purge_batch_refuse(&batch, 0, batch.count);
    heap_put_back(&heap, &batch);
    heap_put_blocks(&heap, all + BLOCKS - 1, 1);
    CHECK_EQUAL(heap_used_pages(&heap), 0);
    end_heap();
}

int main(void) {
    prepare_heaps();
    test_plan_of_many_slabs();
    test_plan_of_neighbours();
    test_plan_that_fails();
    return 0;
}
