/* The descriptors' own memory, which goes back to the kernel where none is in use. */
#include "heap/span_table.h"

#include "heap_model.h"

static size_t idle_descriptors(const struct iovec *ranges, size_t count) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++) {
        size_t offset = (size_t)((char *)ranges[i].iov_base - heap.space.spans.memory[TABLE_SPANS].base);
        size_t first = offset / heap.space.spans.span_bytes;
        size_t end =
            (offset + ranges[i].iov_len + heap.space.spans.span_bytes - 1) / heap.space.spans.span_bytes;
        for (size_t number = first; number < end; number++) {
            CHECK_EQUAL(span_at(&heap.space.spans, (uint32_t)number)->state, SPAN_UNUSED);
        }
        found += end - first;
    }
    return found;
}

#define PAGES_EACH 20000

static void *each_page[PAGES_EACH];

/* Many small runs, and then none: what described them is idle, apart from a few that are strewn about. */
static void fill_descriptors(void) {
    bool zero;
    for (size_t i = 0; i < PAGES_EACH; i++) {
        each_page[i] = heap_take_large(&heap, 1, 1, RUN_FOR_ANY, colored, &zero);
        CHECK(each_page[i] != NULL);
    }
    for (size_t i = 0; i < PAGES_EACH; i++) {
        if (i % 5000 != 0) {
            CHECK(heap_put_large(&heap, each_page[i]) == NULL);
        }
    }
}

static void empty_descriptors(void) {
    for (size_t i = 0; i < PAGES_EACH; i += 5000) {
        CHECK(heap_put_large(&heap, each_page[i]) == NULL);
    }
}

static void test_idle_descriptors(void) {
    struct iovec ranges[8];
    CHECK(start_heap(((size_t)1 << 18) * page_size));
    CHECK_EQUAL(span_table_take_idle(&heap.space.spans, ranges, 8), 0);
    for (int round = 0; round < 4; round++) {
        fill_descriptors();
        heap_walk(&heap, NULL, 0);
        size_t most = round == 0 ? 8 : 1 + below(8);
        size_t count = span_table_take_idle(&heap.space.spans, ranges, most);
        CHECK(count > 0 && count <= most);
        size_t idle = idle_descriptors(ranges, count);
        size_t bytes = 0;
        for (size_t i = 0; i < count; i++) {
            CHECK_EQUAL((uintptr_t)ranges[i].iov_base % page_size + ranges[i].iov_len % page_size, 0);
            bytes += ranges[i].iov_len;
        }
        CHECK(idle * heap.space.spans.span_bytes >= bytes);
        CHECK(round > 0 || bytes >= PAGES_EACH * heap.space.spans.span_bytes / 2);
        heap_walk(&heap, NULL, idle);
        CHECK_EQUAL(span_table_take_idle(&heap.space.spans, ranges, 0), 0); /* nothing was dropped since */
        /* Meanwhile the heap goes on, with other descriptors. */
        for (size_t number = 0; number < 2000; number++) {
            size_t dice = below(3);
            struct slot *slot = &slots[SMALL_SLOTS + below(SLOTS - SMALL_SLOTS)];
            if (dice == 0 && slot->block == NULL) {
                take_large(slot);
            } else if (dice == 1) {
                take_small();
            } else {
                put_some(20);
            }
            if (number % 64 == 0) {
                heap_walk(&heap, NULL, idle);
                CHECK_EQUAL(idle_descriptors(ranges, count), idle);
            }
        }
        if (round % 2 == 0) {
            CHECK_EQUAL(purge_ranges(ranges, count).ranges_done, count);
        }
        span_table_put_idle(&heap.space.spans, ranges, count);
        heap_walk(&heap, NULL, 0);
        empty_descriptors();
        put_everything();
        heap_walk(&heap, NULL, 0);
    }
    check_all_given_back();
    end_heap();
}

int main(void) {
    prepare_heaps();
    test_idle_descriptors();
    return 0;
}
