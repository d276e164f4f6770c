/*
 * A model of one heap (one_heap.h): slots with blocks whose contents are known, operations on them at random,
 * and a comparison of the heap with a walk over all its pages.
 */
#ifndef CALM_TESTS_HEAP_MODEL_H
#define CALM_TESTS_HEAP_MODEL_H

#include "heap/marks.h"
#include "one_heap.h"

#define SLOTS        1200
#define SMALL_SLOTS  1000 /* the others are for large blocks */
#define MAX_LARGE    96   /* pages */
#define FILLED_WHOLE 1024

struct slot {
    unsigned char *block;
    size_t bytes;
    uint64_t mark;
    uint32_t size_class; /* 0: large */
};

static struct slot slots[SLOTS];
static bool batch_out;
static bool marks_blocks;
static size_t claimed_pages; /* by the batch */

/* What a run should have come across. */
static struct {
    size_t blocks, large, zeros, refusals, resizes, moves, batches, purged, kept, misuses, descriptors;
} seen;

/* ---- what blocks hold ---- */

/* A small block's every word; of others the first and the last of each KiB and of the block. */
static inline void each_word(struct slot *slot, size_t bytes, bool write) {
    size_t step = slot->bytes <= FILLED_WHOLE ? 8 : FILLED_WHOLE;
    for (size_t at = 0; at + 8 <= bytes; at += step) {
        uint64_t *word = (uint64_t *)(void *)(slot->block + at);
        if (write) {
            *word = slot->mark + at;
        } else {
            CHECK_EQUAL(*word, slot->mark + at);
        }
    }
    uint64_t *last = (uint64_t *)(void *)(slot->block + slot->bytes - 8);
    if (write) {
        *last = slot->mark + slot->bytes - 8;
    } else if (bytes == slot->bytes) {
        CHECK_EQUAL(*last, slot->mark + slot->bytes - 8);
    }
}

static inline void fill(struct slot *slot) {
    slot->mark = next_random();
    each_word(slot, slot->bytes, true);
}

static inline void check_filled(struct slot *slot) {
    each_word(slot, slot->bytes, false);
}

static inline void check_zero(const unsigned char *block, size_t bytes) {
    const uint64_t *words = (const uint64_t *)(const void *)block;
    for (size_t i = 0; i < bytes / 8; i++) {
        CHECK_EQUAL(words[i], 0);
    }
    seen.zeros++;
}

/* Shell's sort: qsort allocates, and here memory may be short. */
static inline void sort_by_address(const struct slot **slots_found, size_t count) {
    for (size_t gap = count / 2; gap > 0; gap /= 2) {
        for (size_t i = gap; i < count; i++) {
            const struct slot *one = slots_found[i];
            size_t place = i;
            for (; place >= gap && slots_found[place - gap]->block > one->block; place -= gap) {
                slots_found[place] = slots_found[place - gap];
            }
            slots_found[place] = one;
        }
    }
}

static inline void check_no_overlap(void) {
    static const struct slot *live[SLOTS];
    size_t count = 0;
    for (size_t i = 0; i < SLOTS; i++) {
        if (slots[i].block != NULL) {
            live[count++] = &slots[i];
        }
    }
    sort_by_address(live, count);
    for (size_t i = 0; i + 1 < count; i++) {
        CHECK(live[i]->block + live[i]->bytes <= live[i + 1]->block);
    }
}

/* A step leaves what a walk would find, and blocks that overlap hold what is wrong: not after each step. */
#define STEPS_PER_WALK  16
#define WALKS_PER_ORDER 8

static inline void check_heap(void) {
    static size_t walks;
    CHECK_EQUAL(new_misuses(), 0);
    if (walks++ % WALKS_PER_ORDER == 0) {
        check_no_overlap();
    }
    struct heap_walk walk = heap_walk(&heap, batch_out ? &batch : NULL, 0);
    CHECK_EQUAL(heap.claimed_pages, batch_out ? claimed_pages : 0);
    size_t large = 0;
    size_t small = 0;
    for (size_t i = 0; i < SLOTS; i++) {
        large += slots[i].block != NULL && slots[i].size_class == 0;
        small += slots[i].block != NULL && slots[i].size_class != 0;
    }
    CHECK_EQUAL(walk.large_blocks, large);
    /* Within slabs a batch holds blocks too. */
    CHECK(batch_out ? walk.used_blocks >= small : walk.used_blocks == small);
}

/* ---- the operations ---- */

static inline struct slot *any_slot(void) {
    return &slots[below(4) == 0 ? SMALL_SLOTS + below(SLOTS - SMALL_SLOTS) : below(SMALL_SLOTS)];
}

static inline void take_small(void) {
    uint32_t size_class = 1 + (uint32_t)(below(3) == 0 ? below(classes.count - 1) : below(24));
    void *blocks[64];
    size_t wanted = 1 + below(sizeof blocks / sizeof blocks[0]);
    size_t empty = 0;
    for (size_t i = 0; i < SMALL_SLOTS && empty < wanted; i++) {
        empty += slots[i].block == NULL;
    }
    wanted = empty < wanted ? empty : wanted;
    size_t got = heap_take_blocks(&heap, size_class, blocks, wanted);
    CHECK(got <= wanted);
    seen.refusals += got < wanted;
    seen.blocks += got;
    for (size_t i = 0; got > 0 && i < SMALL_SLOTS; i++) {
        if (slots[i].block == NULL) {
            slots[i] = (struct slot){blocks[--got], classes.of[size_class].size, 0, size_class};
            fill(&slots[i]);
        }
    }
}

static inline void take_large(struct slot *slot) {
    size_t pages = 1 + below(below(4) == 0 ? MAX_LARGE : 12);
    size_t align_pages = below(4) == 0 ? (size_t)1 << below(6) : 1;
    static const enum run_choice choices[] = {RUN_FOR_ANY, RUN_FOR_LARGE, RUN_FOR_SPARSE, RUN_FOR_MOVE,
                                              RUN_FOR_HUGE_PAGES};
    enum run_choice choice = choices[below(heap.runs.region_pages > 0 ? 5 : 4)];
    bool zero = false;
    unsigned char *block = heap_take_large(&heap, pages, align_pages, choice, colored, &zero);
    if (block == NULL) {
        seen.refusals++;
        return;
    }
    CHECK_EQUAL((uintptr_t)block % (align_pages * page_size), 0);
    *slot = (struct slot){block, pages * page_size, 0, 0};
    struct span *span = heap_large_span(&heap, block);
    CHECK(span != NULL && span->base == (char *)block);
    CHECK_EQUAL(span->pages, pages);
    CHECK(heap_large_span(&heap, block + 16) == NULL);
    CHECK(heap_large_span(&heap, block + slot->bytes - page_size) == (pages == 1 ? span : NULL));
    if (zero) {
        check_zero(block, slot->bytes);
    }
    seen.large++;
    fill(slot);
}

/* As a program does it, of blocks of slabs too; what the kernel refuses is noted all the same. */
static inline void mark(const struct slot *slot) {
    if (below(16) == 0 && marks_blocks) {
        marks_note(&heap, slot->block, slot->bytes, MARK_ANY);
    }
    if (below(4) == 0 && marks_blocks && heap.runs.region_pages > 0) {
        marks_request_huge_pages(&heap, slot->block, slot->bytes);
    }
}

static inline void put_large(struct slot *slot) {
    struct span *renew = heap_put_large(&heap, slot->block);
    if (renew != NULL) {
        heap_walk(&heap, batch_out ? &batch : NULL, 0);
        enum vm_renewed renewed =
            below(4) == 0 ? VM_RESTORED : vm_renew(renew->base, renew->pages * page_size);
        heap_put_renewed(&heap, renew, renewed);
    }
}

/* Some slots, as many as are full of those that are picked; of small blocks together. */
static inline void put_some(size_t count) {
    void *blocks[64];
    size_t small = 0;
    for (size_t i = 0; i < count; i++) {
        struct slot *slot = any_slot();
        if (slot->block == NULL) {
            continue;
        }
        check_filled(slot);
        mark(slot);
        if (slot->size_class == 0) {
            put_large(slot);
        } else {
            blocks[small++] = slot->block;
        }
        slot->block = NULL;
    }
    heap_put_blocks(&heap, blocks, small);
}

static inline void purge(void) {
    if (!batch_out) {
        size_t before = heap_dirty_pages(&heap);
        size_t in_slabs = heap.slab_dirty_pages;
        size_t used = heap_used_pages(&heap);
        size_t pages = below(2) == 0 ? SIZE_MAX : below(before + 2);
        enum purge_depth depth = (enum purge_depth)below(3);
        size_t taken = heap_take_dirty(&heap, &batch, pages, depth);
        CHECK_EQUAL(taken, batch.pages);
        /* Blocks of what is taken within slabs may touch dirty pages that are not. */
        CHECK(heap_dirty_pages(&heap) <= before - taken);
        CHECK(depth >= PURGE_SLABS || heap_dirty_pages(&heap) == before - taken);
        CHECK(depth >= PURGE_SLABS || heap.slab_dirty_pages == in_slabs);
        CHECK(taken < pages + HUGE_PAGES + classes.of[classes.count - 1].slab_pages || pages == SIZE_MAX);
        CHECK(depth < PURGE_SPLIT || taken >= pages || heap_dirty_pages(&heap) == 0 ||
              taken * page_size >= PURGE_BYTES || batch.count == PURGE_MAX_RANGES);
        CHECK_EQUAL(heap_used_pages(&heap), used);
        claimed_pages = heap.claimed_pages;
        batch_out = true;
        return;
    }
    size_t wanted = below(3) == 0 ? below(batch.count + 1) : batch.count;
    struct purge_result result = purge_ranges(batch.ranges, wanted);
    CHECK_EQUAL(result.ranges_done, wanted);
    for (size_t i = 0; i < wanted; i++) {
        seen.purged += batch.ranges[i].iov_len / page_size;
    }
    seen.kept += batch.count - wanted;
    purge_batch_refuse(&batch, wanted, batch.count);
    heap_put_back(&heap, &batch);
    batch_out = false;
    seen.batches++;
}

static inline void put_everything(void) {
    if (batch_out) {
        purge();
    }
    for (size_t i = 0; i < SLOTS; i++) {
        if (slots[i].block != NULL) {
            check_filled(&slots[i]);
            if (slots[i].size_class == 0) {
                put_large(&slots[i]);
            } else {
                void *block = slots[i].block;
                heap_put_blocks(&heap, &block, 1);
            }
            slots[i].block = NULL;
        }
    }
}

/* Nothing in use, and all of it purged: each segment is one clean run, and zero. */
static inline void check_all_given_back(void) {
    put_everything();
    check_heap();
    CHECK_EQUAL(heap.used_pages, 0);
    CHECK_EQUAL(heap.slab_dirty_pages, 0);
    while (heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT) > 0) {
        CHECK_EQUAL(purge_ranges(batch.ranges, batch.count).ranges_done, batch.count);
        heap_put_back(&heap, &batch);
    }
    struct heap_walk walk = heap_walk(&heap, NULL, 0);
    CHECK_EQUAL(heap_dirty_pages(&heap) + walk.purging_pages, 0);
    CHECK_EQUAL(walk.slabs + walk.large_blocks, 0);
    size_t segments = atomic_load(&heap.space.segments);
    CHECK(heap.runs.regions > 0 || walk.runs[RUN_CLEAN] <= segments);
    for (size_t i = 0; i < segments; i++) {
        const struct address_range *region = &heap.space.segment[i].region;
        check_zero((const unsigned char *)region->base, region->committed);
    }
}

#endif
