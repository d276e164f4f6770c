/* Large blocks that are moved by their page tables. */
#include "heap/large_blocks.h"

#include "heap_model.h"

/* Each move may cost a mapping, but not once the block is gone: however often blocks were moved, what is
 * counted is what is there. */
static void test_moves_leave_no_mappings(void) {
    CHECK(start_heap((size_t)1 << 30));
    size_t before = 2; /* what is usable, and the rest */
    struct slot *slot = &slots[0];
    bool zero;
    for (size_t round = 0; round < 50; round++) {
        *slot = (struct slot){heap_take_large(&heap, 8, 1, RUN_FOR_ANY, colored, &zero), 8 * page_size, 0, 0};
        fill(slot);
        /* Something behind it that stays, so that nothing merges. */
        void *stays = heap_take_large(&heap, 3, 1, RUN_FOR_ANY, colored, &zero);
        for (size_t moves = 0; moves < 3; moves++) {
            void *to = heap_take_large(&heap, 8 + 8 * moves, 1, RUN_FOR_MOVE, colored, &zero);
            /* After the second move, the block is two mappings, which stay where they are. */
            bool moved = vm_move_pages(slot->block, to, slot->bytes);
            CHECK_EQUAL(moved, moves < 2);
            if (!moved) {
                CHECK(heap_put_large(&heap, to) == NULL);
                check_filled(slot);
                break;
            }
            heap_moved(&heap, heap_large_span(&heap, slot->block), heap_large_span(&heap, to));
            slot->block = to;
            check_filled(slot);
            slot->bytes = (8 + 8 * moves) * page_size;
            fill(slot);
        }
        if (round % 2 == 0) {
            /* What would be cut off came from elsewhere, too: it stays, or the block is copied. */
            CHECK(heap_resize_large(&heap, heap_large_span(&heap, slot->block), 10));
            CHECK_EQUAL(heap_large_span(&heap, slot->block)->pages, 16);
            CHECK(!heap_resize_large(&heap, heap_large_span(&heap, slot->block), 3));
        }
        struct span *renew = heap_put_large(&heap, slot->block);
        if (renew != NULL) {
            CHECK(vm_replace(renew->base, renew->pages * page_size));
            heap_put_renewed(&heap, renew, VM_RENEWED);
        }
        (void)stays;
    }
    CHECK_EQUAL(heap.moved_spans, 0);
    size_t mappings = count_mappings((void *)heap.space.base, heap.space.quanta << SPACE_QUANTUM_SHIFT);
    printf("100 moves, 0 moved blocks left: %zu mappings\n", mappings);
    CHECK(mappings <= before + 4);
    end_heap();
}

int main(void) {
    prepare_heaps();
    if (pages_can_move()) {
        test_moves_leave_no_mappings();
    }
    return 0;
}
