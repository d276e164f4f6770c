/*
 * The heap in isolation, compared with a model: blocks of all classes and large ones are allocated, freed,
 * resized and moved at random, while ranges are taken out to be purged and returned, purged or not. The
 * heap's counters are compared with a walk over all its pages.
 */
#include "heap/large_blocks.h"
#include "heap/marks.h"
#include "heap/slab.h"
#include "heap/slab_blocks.h"
#include "heap/walk.h"
#include "os/file.h"
#include "os/purge.h"

#include "check.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#define SLOTS        1200
#define SMALL_SLOTS  1000 /* the others are for large blocks */
#define MIB          ((size_t)1 << 20)
#define MAX_LARGE    96 /* pages */
#define HUGE_PAGES   16 /* in a huge-page region: no system's, but regions are many and small then */
#define FILLED_WHOLE 1024

struct slot {
    unsigned char *block;
    size_t bytes;
    uint64_t mark;
    uint32_t class; /* 0: large */
};

static struct size_classes classes;
static struct heap heap;
static struct slot slots[SLOTS];
static struct purge_batch batch;
static bool batch_out;
static bool marks_blocks;
static size_t claimed_pages; /* by it */
static size_t page_size;
static uint64_t random_state;
static size_t steps = 20000;
static const struct take_options anywhere = {.new_slabs = RUN_FOR_ANY};

static size_t misuses_expected;
static bool colored; /* whether large blocks are spread by their colors */

/* What a run should have come across. */
static struct {
    size_t blocks, large, zeros, refusals, resizes, moves, batches, purged, kept, misuses, descriptors;
} seen;

static uint64_t next_random(void) {
    return check_random(&random_state);
}

static size_t below(size_t bound) {
    return next_random() % bound;
}

/* That no test has expected yet. */
static size_t new_misuses(void) {
    return heap.misuses - misuses_expected;
}

static enum misuse last_misuse(void) {
    return heap.misuse[(heap.misuses - 1) % MISUSE_RECORDS].kind;
}

static void expect_misuse(enum misuse kind, const void *pointer) {
    CHECK_EQUAL(new_misuses(), 1);
    CHECK_EQUAL(last_misuse(), kind);
    CHECK(heap.misuse[misuses_expected % MISUSE_RECORDS].pointer == pointer);
    misuses_expected++;
    seen.misuses++;
}

static bool start_heap(size_t address_space) {
    memset(&heap, 0, sizeof heap);
    memset(slots, 0, sizeof slots);
    batch_out = false;
    misuses_expected = 0;
    colored = false;
    return heap_init(&heap, &classes, address_space);
}

static void end_heap(void) {
    struct space *space = &heap.space;
    span_table_release(&space->spans);
    for (size_t i = 0; i < PAGE_TABLES; i++) {
        address_range_release(&space->page_tables[i]);
    }
    for (size_t i = 0; i < atomic_load(&space->segments); i++) {
        address_range_release(&space->segment[i].region);
    }
}

/* ---- what blocks hold ---- */

/* A small block's every word; of others the first and the last of each KiB and of the block. */
static void each_word(struct slot *slot, size_t bytes, bool write) {
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

static void fill(struct slot *slot) {
    slot->mark = next_random();
    each_word(slot, slot->bytes, true);
}

static void check_filled(struct slot *slot) {
    each_word(slot, slot->bytes, false);
}

static void check_zero(const unsigned char *block, size_t bytes) {
    const uint64_t *words = (const uint64_t *)(const void *)block;
    for (size_t i = 0; i < bytes / 8; i++) {
        CHECK_EQUAL(words[i], 0);
    }
    seen.zeros++;
}

/* Shell's sort: qsort allocates, and here memory may be short. */
static void sort_by_address(const struct slot **slots_found, size_t count) {
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

static void check_no_overlap(void) {
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

static void check_heap(void) {
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
        large += slots[i].block != NULL && slots[i].class == 0;
        small += slots[i].block != NULL && slots[i].class != 0;
    }
    CHECK_EQUAL(walk.large_blocks, large);
    /* Within slabs a batch holds blocks too. */
    CHECK(batch_out ? walk.used_blocks >= small : walk.used_blocks == small);
}

/* ---- the operations ---- */

static struct slot *any_slot(void) {
    return &slots[below(4) == 0 ? SMALL_SLOTS + below(SLOTS - SMALL_SLOTS) : below(SMALL_SLOTS)];
}

static void take_small(void) {
    uint32_t class = 1 + (uint32_t)(below(3) == 0 ? below(classes.count - 1) : below(24));
    void *blocks[64];
    size_t wanted = 1 + below(sizeof blocks / sizeof blocks[0]);
    size_t empty = 0;
    for (size_t i = 0; i < SMALL_SLOTS && empty < wanted; i++) {
        empty += slots[i].block == NULL;
    }
    wanted = empty < wanted ? empty : wanted;
    static const enum run_choice choices[] = {RUN_FOR_ANY, RUN_FOR_LARGE, RUN_FOR_HUGE_PAGES};
    struct take_options options = {.new_slabs = choices[below(heap.runs.region_pages > 0 ? 3 : 1)]};
    size_t got = heap_take_blocks(&heap, class, blocks, wanted, &options);
    CHECK(got <= wanted);
    seen.refusals += got < wanted;
    seen.blocks += got;
    for (size_t i = 0; got > 0 && i < SMALL_SLOTS; i++) {
        if (slots[i].block == NULL) {
            slots[i] = (struct slot){blocks[--got], classes.of[class].size, 0, class};
            fill(&slots[i]);
        }
    }
}

static void take_large(struct slot *slot) {
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
static void mark(const struct slot *slot) {
    if (below(16) == 0 && marks_blocks) {
        marks_note(&heap, slot->block, slot->bytes, MARK_ANY);
    }
    if (below(4) == 0 && marks_blocks && heap.runs.region_pages > 0) {
        marks_request_huge_pages(&heap, slot->block, slot->bytes);
    }
}

static void put_large(struct slot *slot) {
    struct span *renew = heap_put_large(&heap, slot->block);
    if (renew != NULL) {
        heap_walk(&heap, batch_out ? &batch : NULL, 0);
        enum vm_renewed renewed =
            below(4) == 0 ? VM_RESTORED : vm_renew(renew->base, renew->pages * page_size);
        heap_put_renewed(&heap, renew, renewed);
    }
}

/* Some slots, as many as are full of those that are picked; of small blocks together. */
static void put_some(size_t count) {
    void *blocks[64];
    size_t small = 0;
    for (size_t i = 0; i < count; i++) {
        struct slot *slot = any_slot();
        if (slot->block == NULL) {
            continue;
        }
        check_filled(slot);
        mark(slot);
        if (slot->class == 0) {
            put_large(slot);
        } else {
            blocks[small++] = slot->block;
        }
        slot->block = NULL;
    }
    heap_put_blocks(&heap, blocks, small);
}

static void resize(struct slot *slot) {
    struct span *span = heap_large_span(&heap, slot->block);
    CHECK(span != NULL);
    size_t pages = 1 + below(MAX_LARGE);
    size_t held = slot->bytes;
    bool resized = heap_resize_large(&heap, span, pages);
    CHECK(heap_large_span(&heap, slot->block) == span);
    if (!resized) {
        CHECK_EQUAL(span->pages * page_size, held);
        seen.refusals++;
        return;
    }
    /* Without a descriptor for the rest it stays longer than was asked. */
    CHECK(span->pages == pages || (span->pages > pages && span->pages * page_size == held));
    each_word(slot, (span->pages * page_size < held ? span->pages * page_size : held) - 8, false);
    slot->bytes = span->pages * page_size;
    fill(slot);
    seen.resizes++;
}

static void move(struct slot *slot) {
    struct span *span = heap_large_span(&heap, slot->block);
    bool zero = false;
    size_t pages = span->pages + below(4);
    unsigned char *to =
        heap_may_move(&heap) ? heap_take_large(&heap, pages, 1, RUN_FOR_MOVE, colored, &zero) : NULL;
    if (to == NULL) {
        seen.refusals++;
        return;
    }
    if (!vm_move_pages(slot->block, to, slot->bytes)) {
        CHECK(heap_put_large(&heap, to) == NULL);
        return;
    }
    heap_moved(&heap, span, heap_large_span(&heap, to));
    slot->block = to;
    check_filled(slot);
    slot->bytes = pages * page_size;
    fill(slot);
    seen.moves++;
}

static void purge(void) {
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
    heap_put_back(&heap, &batch, wanted);
    batch_out = false;
    seen.batches++;
}

/* Frees that name no block in use: each is reported, and changes nothing. */
static void misuse(void) {
    struct slot *slot = any_slot();
    if (slot->block == NULL) {
        void *foreign[] = {NULL, &heap, slot};
        void *one = foreign[below(3)];
        heap_put_blocks(&heap, &one, 1);
        expect_misuse(MISUSE_INVALID_FREE, one);
        CHECK(heap_put_large(&heap, one) == NULL);
        expect_misuse(MISUSE_INVALID_FREE, one);
        return;
    }
    void *inside = slot->block + 1 + below(slot->bytes - 1);
    heap_put_blocks(&heap, &inside, 1);
    expect_misuse(MISUSE_INVALID_FREE, inside);
    CHECK(heap_put_large(&heap, inside) == NULL);
    expect_misuse(MISUSE_INVALID_FREE, inside);
    if (batch_out) {
        return; /* what a batch holds counts as in use */
    }
    void *block = slot->block;
    check_filled(slot);
    slot->block = NULL;
    if (slot->class == 0) {
        put_large(&(struct slot){.block = block});
        CHECK(heap_put_large(&heap, block) == NULL);
        /* The page may be in the middle of a free run by now: then nothing is known of it. */
        expect_misuse(last_misuse(), block);
        heap_put_blocks(&heap, &block, 1);
        expect_misuse(last_misuse(), block);
    } else {
        heap_put_blocks(&heap, &block, 1);
        CHECK_EQUAL(new_misuses(), 0);
        bool open = heap.space.class_of[space_page(&heap.space, block)] != 0;
        heap_put_blocks(&heap, &block, 1);
        expect_misuse(open ? MISUSE_DOUBLE_FREE : last_misuse(), block);
    }
}

static void step(size_t number) {
    /* Grows and shrinks in waves. */
    bool grow = number / 1000 % 2 == 0;
    struct slot *slot = &slots[SMALL_SLOTS + below(SLOTS - SMALL_SLOTS)];
    size_t dice = below(100);
    if (dice < 5) {
        purge();
    } else if (dice < 8) {
        misuse();
    } else if (slot->block != NULL && dice < 16) {
        move(slot);
    } else if (slot->block != NULL && dice < 32) {
        resize(slot);
    } else if (slot->block == NULL && dice < (grow ? 60 : 40)) {
        take_large(slot);
    } else if (dice < (grow ? 80 : 60)) {
        take_small();
    } else {
        put_some(1 + below(grow ? 12 : 40));
    }
    CHECK_EQUAL(new_misuses(), 0);
}

static void put_everything(void) {
    if (batch_out) {
        purge();
    }
    for (size_t i = 0; i < SLOTS; i++) {
        if (slots[i].block != NULL) {
            check_filled(&slots[i]);
            if (slots[i].class == 0) {
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
static void check_all_given_back(void) {
    put_everything();
    check_heap();
    CHECK_EQUAL(heap.used_pages, 0);
    CHECK_EQUAL(heap.slab_dirty_pages, 0);
    while (heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT) > 0) {
        CHECK_EQUAL(purge_ranges(batch.ranges, batch.count).ranges_done, batch.count);
        heap_put_back(&heap, &batch, batch.count);
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

enum { COLORS = 8 }; /* half of a huge-page region */

/* Blocks of huge-page regions are spread over the colors of a cache, of each of which it holds so many. */
static void spread(unsigned ways) {
    const struct hardware_cache cache = {.level = 2,
                                         .bytes = ways * COLORS * page_size,
                                         .ways = ways,
                                         .line_bytes = 64,
                                         .sets = COLORS * page_size / 64,
                                         .cpus = 1};
    colors_init(&heap.colors, &cache, 1, page_size, HUGE_PAGES * page_size, 0);
    colored = true;
}

/* ways: of the cache by whose colors blocks are spread; 0: none. */
static void run_model(uint64_t seed, size_t address_space, bool huge, unsigned ways, bool refuses) {
    marks_blocks = true;
    random_state = seed * 0x9e3779b97f4a7c15U | 1;
    memset(&seen, 0, sizeof seen);
    CHECK(start_heap(address_space));
    heap.runs.region_pages = huge ? HUGE_PAGES : 0;
    if (ways > 0) {
        spread(ways);
    }
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % STEPS_PER_WALK == 0) {
            check_heap();
        }
    }
    check_all_given_back();
    printf("seed %llu, %zu MiB: %zu blocks, %zu large, %zu zero, %zu refused, %zu resized, %zu moved, %zu "
           "batches, %zu pages purged, %zu ranges not, %zu misuses\n",
           (unsigned long long)seed, address_space / MIB, seen.blocks, seen.large, seen.zeros, seen.refusals,
           seen.resizes, seen.moves, seen.batches, seen.purged, seen.kept, seen.misuses);
    CHECK(seen.blocks > 0 && seen.large > 0 && seen.zeros > 0 && seen.moves > 0 && seen.purged > 0);
    CHECK(seen.misuses > 0 && seen.kept > 0);
    CHECK(!refuses || seen.refusals > steps / 100);
    end_heap();
    marks_blocks = false;
}

/* ---- memory that runs out ---- */

#define MANY 4096

static void *many[MANY];

/* Pages one by one, so that it is descriptors, not pages, that run out; and then everything else is refused
 * or done without. */
static void test_descriptors_run_out(void) {
    CHECK(start_heap(8 * MIB));
    bool zero;
    size_t count = 0;
    while (count < MANY &&
           (many[count] = heap_take_large(&heap, 1, 1, RUN_FOR_ANY, colored, &zero)) != NULL) {
        count++;
    }
    CHECK(count >= 1000 && count < MANY);
    heap_walk(&heap, NULL, 0);
    /* Every second one: each free page is a run of its own. */
    for (size_t i = 0; i < count; i += 2) {
        CHECK(heap_put_large(&heap, many[i]) == NULL);
    }
    heap_walk(&heap, NULL, 0);
    void *blocks[300];
    size_t got = heap_take_blocks(&heap, 1, blocks, 300, &anywhere);
    heap_walk(&heap, NULL, 0);
    heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT);
    heap_walk(&heap, &batch, 0);
    purge_ranges(batch.ranges, batch.count);
    heap_put_back(&heap, &batch, batch.count);
    heap_walk(&heap, NULL, 0);
    heap_put_blocks(&heap, blocks, got);
    for (size_t i = 1; i < count; i += 2) {
        CHECK(heap_put_large(&heap, many[i]) == NULL);
    }
    CHECK_EQUAL(new_misuses(), 0);
    check_all_given_back();
    end_heap();
}

/* What there is can be had to the last page, and again once it was given back. */
static void take_all_twice(void) {
    size_t before = 0;
    for (int round = 0; round < 2; round++) {
        size_t pages = 0;
        size_t count = 0;
        bool zero;
        for (size_t size = 256; size > 0; size /= 2) {
            while (count < MANY &&
                   (many[count] = heap_take_large(&heap, size, 1, RUN_FOR_ANY, colored, &zero)) != NULL) {
                memset(many[count++], 0xA5, size * page_size);
                pages += size;
            }
        }
        heap_walk(&heap, NULL, 0);
        CHECK_EQUAL(heap.used_pages, pages);
        CHECK(pages * page_size >= MIB);
        CHECK(round == 0 || pages == before);
        before = pages;
        void *block;
        CHECK_EQUAL(heap_take_blocks(&heap, 20, &block, 1, &anywhere), 0);
        CHECK(!heap_resize_large(&heap, heap_large_span(&heap, many[0]), 100000));
        while (count > 0) {
            CHECK(heap_put_large(&heap, many[--count]) == NULL);
        }
    }
    check_all_given_back();
}

static void test_address_space_runs_out(void) {
    CHECK(start_heap(8 * MIB));
    take_all_twice();
    end_heap();
}

static size_t process_kib(const char *name) {
    static char text[4096];
    CHECK(file_read("/proc/self/status", text, sizeof text) > 0);
    const char *line = strstr(text, name);
    CHECK(line != NULL);
    return strtoull(line + strlen(name), NULL, 10);
}

static void purge_all(void) {
    while (heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT) > 0) {
        CHECK_EQUAL(purge_ranges(batch.ranges, batch.count).ranges_done, batch.count);
        heap_put_back(&heap, &batch, batch.count);
    }
}

static char *take_pages(size_t pages, bool *zero) {
    char *block = heap_take_large(&heap, pages, 1, RUN_FOR_ANY, colored, zero);
    CHECK(block != NULL);
    return block;
}

static void put_pages(char *block) {
    CHECK(heap_put_large(&heap, block) == NULL);
}

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

/* Of what is used already, and so much more. */
static void limit(int resource, const char *used, size_t more) {
    struct rlimit limit;
    CHECK(getrlimit(resource, &limit) == 0);
    limit.rlim_cur = (process_kib(used) << 10) + more;
    CHECK(setrlimit(resource, &limit) == 0);
}

/* An address belongs to the segment that holds it, whatever the order of their addresses; one byte outside
 * does not. */
static void check_segments_are_found(void) {
    const struct space *space = &heap.space;
    size_t segments = atomic_load(&space->segments);
    for (size_t i = 0; i < segments; i++) {
        const struct segment *segment = &space->segment[i];
        uintptr_t base = (uintptr_t)segment->region.base;
        if (base == 0) {
            continue;
        }
        uintptr_t end = base + segment->region.reserved;
        uint32_t last = segment->first_page + (uint32_t)(segment->region.reserved / space->page_size) - 1;
        CHECK_EQUAL(space_page_elsewhere(space, base), segment->first_page);
        CHECK_EQUAL(space_page_elsewhere(space, end - 1), last);
        CHECK(space_address(space, last) ==
              segment->region.base + segment->region.reserved - space->page_size);
        CHECK(space_page_elsewhere(space, base - 1) != segment->first_page);
        CHECK(space_page_elsewhere(space, end) != last);
        CHECK(space_is_usable(space, segment->first_page) && !space_is_usable(space, last + 1));
    }
    for (size_t i = 1; i < segments; i++) {
        for (int order = 0; order < SEGMENT_ORDERS; order++) {
            const struct segment *last = &space->segment[space->order[order][i - 1]];
            const struct segment *next = &space->segment[space->order[order][i]];
            CHECK(next->region.base == NULL || (order == BY_ADDRESS ? last->region.base < next->region.base
                                                                    : last->first_page < next->first_page));
        }
    }
    CHECK_EQUAL(space_page_elsewhere(space, 0), 0);
    CHECK_EQUAL(space_page_elsewhere(space, (uintptr_t)space), 0);
}

/* Address space by the segment, where a great range cannot be had. */
static void test_limited_address_space(void) {
    steps /= 5;
    limit(RLIMIT_AS, "VmSize:", 24 * MIB);
    CHECK(start_heap((size_t)1 << 36));
    CHECK_EQUAL(atomic_load(&heap.space.segments), 0);
    take_all_twice();
    CHECK(atomic_load(&heap.space.segments) > 1);
    check_segments_are_found();
    end_heap();
    run_model(7, (size_t)1 << 36, false, 0, false);
}

struct looked_up {
    void *block;
    uint32_t page;
    _Atomic(bool) stop;
};

/* As a thread does that frees the block. */
static void *look_up(void *argument) {
    struct looked_up *this = argument;
    while (!atomic_load(&this->stop)) {
        CHECK_EQUAL(space_page(&heap.space, this->block), this->page);
        CHECK(space_is_usable(&heap.space, this->page));
        CHECK(heap_large_span(&heap, this->block)->base == this->block);
    }
    return NULL;
}

static void *take_pages_of(size_t pages) {
    bool zero;
    unsigned char *block = heap_take_large(&heap, pages, 1, RUN_FOR_ANY, colored, &zero);
    if (block != NULL) {
        block[0] = block[pages * page_size - 1] = 1;
    }
    return block;
}

/* Each block is longer than the last, which is free by then: its segment goes where address space is short,
 * unless something in it is in use; and nobody looks in vain for a block elsewhere. */
static void test_free_segments_make_room(void) {
    enum { LIMIT = 64 * MIB, STEP = 256 };
    limit(RLIMIT_AS, "VmSize:", (size_t)LIMIT);
    CHECK(start_heap((size_t)1 << 36));
    struct looked_up looked_up = {.block = take_pages_of(1)};
    looked_up.page = space_page(&heap.space, looked_up.block);
    pthread_attr_t small_stack;
    pthread_t reader;
    CHECK(pthread_attr_init(&small_stack) == 0 && pthread_attr_setstacksize(&small_stack, 256 << 10) == 0);
    CHECK(pthread_create(&reader, &small_stack, look_up, &looked_up) == 0);
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    size_t room = limit.rlim_cur - (process_kib("VmSize:") << 10); /* a sanitizer's own memory grows, too */
    size_t most = 0;
    for (int round = 0; round < 20; round++) {
        size_t pages = 0;
        for (void *block = NULL; (block = take_pages_of(pages + STEP)) != NULL;) {
            pages += STEP;
            put_pages(block);
            heap_walk(&heap, NULL, 0);
        }
        CHECK(round < 2 || pages == most);
        most = pages;
    }
    CHECK(most * page_size >= room / 4 * 3);
    check_segments_are_found();

    void *block = take_pages_of(most);
    void *beside = take_pages_of(1);
    put_pages(block);
    size_t segments = atomic_load(&heap.space.segments);
    CHECK(take_pages_of(LIMIT / page_size) == NULL);
    CHECK(atomic_load(&heap.space.segments) <= segments);
    CHECK(heap_large_span(&heap, beside)->base == beside);
    put_pages(beside);
    atomic_store(&looked_up.stop, true);
    CHECK(pthread_join(reader, NULL) == 0);
    put_pages(looked_up.block);
    CHECK(take_pages_of(LIMIT / page_size) == NULL);
    CHECK_EQUAL(atomic_load(&heap.space.segments), 0);
    end_heap();
}

/* Memory that the kernel refuses to make usable. */
static void test_limited_data(void) {
    CHECK(start_heap((size_t)1 << 30));
    limit(RLIMIT_DATA, "VmData:", 16 * MIB);
    take_all_twice();
    steps /= 5;
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % STEPS_PER_WALK == 0) {
            check_heap();
        }
    }
    check_all_given_back();
}

/* ---- descriptors' own memory ---- */

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
    CHECK(start_heap((size_t)1 << 30));
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

/* ---- mappings ---- */

static size_t mappings_of_heap(void) {
    static char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    uintptr_t base = heap.space.base;
    size_t found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        uintptr_t last = strtoull(end + 1, NULL, 16);
        found += first < base + (heap.space.quanta << SPACE_QUANTUM_SHIFT) && last > base;
    }
    fclose(maps);
    return found;
}

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
        for (size_t moves = 0; moves < 4; moves++) {
            void *to = heap_take_large(&heap, 8 + 8 * moves, 1, RUN_FOR_MOVE, colored, &zero);
            CHECK(vm_move_pages(slot->block, to, slot->bytes));
            heap_moved(&heap, heap_large_span(&heap, slot->block), heap_large_span(&heap, to));
            slot->block = to;
            check_filled(slot);
            slot->bytes = (8 + 8 * moves) * page_size;
            fill(slot);
        }
        if (round % 2 == 0) {
            /* What would be cut off came from elsewhere, too: it stays, or the block is copied. */
            CHECK(heap_resize_large(&heap, heap_large_span(&heap, slot->block), 20));
            CHECK_EQUAL(heap_large_span(&heap, slot->block)->pages, 32);
            CHECK(!heap_resize_large(&heap, heap_large_span(&heap, slot->block), 5));
        }
        struct span *renew = heap_put_large(&heap, slot->block);
        if (renew != NULL) {
            CHECK(vm_replace(renew->base, renew->pages * page_size));
            heap_put_renewed(&heap, renew, VM_RENEWED);
        }
        (void)stays;
    }
    CHECK_EQUAL(heap.moved_spans, 0);
    size_t mappings = mappings_of_heap();
    printf("200 moves, 0 moved blocks left: %zu mappings\n", mappings);
    CHECK(mappings <= before + 4);
    end_heap();
}

/* ---- pages that are made resident ahead ---- */

enum { PREFAULT_SLOTS = 400, PREFAULT_ROUNDS = 3000 };

static size_t pages_prefaulted;
static size_t calls_prefaulted;

static size_t resident_pages(const void *start, size_t pages) {
    static unsigned char resident[512];
    CHECK(pages <= sizeof resident);
    CHECK_EQUAL(mincore((void *)(uintptr_t)start, pages * page_size, resident), 0);
    size_t count = 0;
    for (size_t i = 0; i < pages; i++) {
        count += resident[i] & 1;
    }
    return count;
}

/* None of them was before; what it does is only what a first touch does. */
static bool note_prefault(void *base, size_t bytes) {
    size_t pages = bytes / page_size;
    CHECK(pages > 0 && bytes % page_size == 0 && (uintptr_t)base % page_size == 0);
    CHECK_EQUAL(resident_pages(base, pages), 0);
    for (size_t i = 0; i < pages; i++) {
        *(volatile char *)((char *)base + i * page_size) = 0;
    }
    pages_prefaulted += pages;
    calls_prefaulted++;
    return true;
}

static size_t pages_of(const void *block, size_t bytes, char **first) {
    uintptr_t from = (uintptr_t)block / page_size * page_size;
    *first = (char *)from;
    return ((uintptr_t)block + bytes - from + page_size - 1) / page_size;
}

/* Blocks that come back whole, in part, and after a purge: all of their pages are resident before who took
 * them touches any, and no page is asked for that is there. */
static void test_prefaults(void) {
    /* A huge page would be more than was touched. */
    CHECK(prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0) == 0);
    CHECK(start_heap((size_t)1 << 40));
    static const struct take_options prefaulted = {.prefault = note_prefault};
    random_state = 88172645463325252U;
    static void *held[PREFAULT_SLOTS][16];
    static size_t count_held[PREFAULT_SLOTS];
    size_t purges = 0;
    size_t at_first = 0;
    for (size_t round = 0; round < PREFAULT_ROUNDS; round++) {
        size_t i = below(PREFAULT_SLOTS);
        if (count_held[i] > 0) {
            heap_put_blocks(&heap, held[i], count_held[i]);
            count_held[i] = 0;
        } else {
            uint32_t class = 1 + (uint32_t)below(classes.count - 1);
            size_t bytes = classes.of[class].size;
            count_held[i] = heap_take_blocks(&heap, class, held[i], 1 + below(16), &prefaulted);
            CHECK(count_held[i] > 0);
            for (size_t j = 0; j < count_held[i]; j++) {
                char *first;
                size_t pages = pages_of(held[i][j], bytes, &first);
                CHECK_EQUAL(resident_pages(first, pages), pages);
            }
        }
        if (below(300) == 0) {
            purge_all();
            purges++;
        }
        at_first = purges == 0 ? pages_prefaulted : at_first;
    }
    CHECK(purges > 0 && calls_prefaulted < pages_prefaulted);
    CHECK(pages_prefaulted > at_first); /* again, after a purge */
    size_t before = pages_prefaulted;
    purge_all();
    CHECK(heap_take_blocks(&heap, 40, held[0], 16, &anywhere) > 0);
    CHECK_EQUAL(pages_prefaulted, before);
    printf("%zu pages made resident ahead in %zu steps, %zu purges\n", pages_prefaulted, calls_prefaulted,
           purges);
}

/* Pages of slabs in huge-page regions are given back last: the kernel must split a huge page for them. */
static void test_slabs_in_regions(void) {
    CHECK(start_heap((size_t)1 << 40));
    heap.runs.region_pages = HUGE_PAGES;
    const struct take_options dense = {.new_slabs = RUN_FOR_HUGE_PAGES};
    /* All but the first and the last block of some slabs, so that these stay. */
    enum { BLOCKS = 512 };
    uint32_t class = size_class_of(&classes, 1024);
    static void *blocks[BLOCKS];
    CHECK_EQUAL(heap_take_blocks(&heap, class, blocks, BLOCKS, &dense), BLOCKS);
    size_t each = classes.of[class].slab_blocks;
    for (size_t i = 0; i < BLOCKS; i++) {
        const struct span *slab = space_span_of(&heap.space, space_page(&heap.space, blocks[i]));
        CHECK(slab->state == SPAN_SLAB && slab->huge);
        size_t number = (size_t)((char *)blocks[i] - slab->base) / classes.of[class].size;
        if (number != 0 && number != each - 1) {
            heap_put_blocks(&heap, &blocks[i], 1);
        }
    }
    CHECK(heap.slab_dirty_pages > 0);
    size_t dirty = heap.slab_dirty_pages;
    heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SLABS);
    CHECK_EQUAL(heap.slab_dirty_pages, dirty);
    heap_put_back(&heap, &batch, batch.count);
    heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT);
    CHECK_EQUAL(heap.slab_dirty_pages, 0);
    heap_put_back(&heap, &batch, batch.count);
    heap_walk(&heap, NULL, 0);
    end_heap();
}

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

/* ---- blocks put back by a plan ---- */

static void put_planned(void *const *blocks, size_t count, struct heap_puts *puts) {
    heap_put_planned(&heap, puts, blocks, count);
    heap_walk(&heap, NULL, 0);
}

/* Blocks of many slabs, in no order, are more than a plan has room for. */
static void test_plan_of_many_slabs(void) {
    enum { BLOCKS = 20000, AT_ONCE = 129 };
    static void *all[BLOCKS];
    CHECK(start_heap((size_t)1 << 40));
    uint32_t class = size_class_of(&classes, 500);
    CHECK_EQUAL(heap_take_blocks(&heap, class, all, BLOCKS, &anywhere), BLOCKS);
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
    for (uint32_t class = 1; class < classes.count; class ++) {
        CHECK(start_heap((size_t)1 << 40));
        CHECK_EQUAL(heap_take_blocks(&heap, class, all, BLOCKS, &anywhere), BLOCKS);
        size_t slabs = (BLOCKS + classes.of[class].slab_blocks - 1) / classes.of[class].slab_blocks;
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
    uint32_t class = size_class_of(&classes, 64);
    enum { BLOCKS = 256 };
    void *all[BLOCKS];
    CHECK_EQUAL(heap_take_blocks(&heap, class, all, BLOCKS, &anywhere), BLOCKS);
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
    for (uint32_t other = class + 1; other < class + 9; other++) {
        CHECK_EQUAL(heap_take_blocks(&heap, class, all, BLOCKS, &anywhere), BLOCKS);
        void *second = all[BLOCKS - 2]; /* the lowest are the last; nothing of the other class begins there */
        heap_plan_puts(&heap, &puts, &second, 1);
        heap_put_blocks(&heap, all, BLOCKS);
        CHECK_EQUAL(heap_take_blocks(&heap, other, others, BLOCKS, &anywhere), BLOCKS);
        CHECK(space_span_of(&heap.space, space_page(&heap.space, second)) == puts.of[0].slab);
        put_planned(&second, 1, &puts);
        expect_misuse(MISUSE_INVALID_FREE, second);
        heap_put_blocks(&heap, others, BLOCKS);
        CHECK_EQUAL(new_misuses(), 0);
    }
    CHECK_EQUAL(heap_used_pages(&heap), 0);

    /* A purge has it. */
    CHECK_EQUAL(heap_take_blocks(&heap, class, all, BLOCKS, &anywhere), BLOCKS);
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
    CHECK(claimed > 0);
    heap_put_back(&heap, &batch, 0);
    heap_put_blocks(&heap, all + BLOCKS - 1, 1);
    CHECK_EQUAL(heap_used_pages(&heap), 0);
    end_heap();
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    uint64_t seed = check_seed(1);
    steps = check_rounds(steps);
    page_size = vm_page_size();
    size_classes_fill(&classes, page_size);

    run_model(seed, (size_t)1 << 40, false, 0, false);
    run_model(seed + 1, 8 * MIB, false, 0, true);
    run_model(seed + 2, 64 * MIB, false, 0, false);
    run_model(seed + 3, (size_t)1 << 40, true, 0, false);
    run_model(seed + 4, 8 * MIB, true, 2, true);
    run_model(seed + 5, (size_t)1 << 40, true, 1, false);
    test_plan_of_many_slabs();
    test_plan_of_neighbours();
    test_plan_that_fails();
    test_descriptors_run_out();
    test_address_space_runs_out();
    test_new_run_of_a_bin_that_is_in_use();
    test_short_runs_are_extended();
    in_child(test_limited_address_space);
    in_child(test_free_segments_make_room);
    in_child(test_limited_data);
    test_idle_descriptors();
    test_moves_leave_no_mappings();
    test_slabs_in_regions();
    test_huge_runs_are_chosen_by_color();
    test_new_regions_are_few();
    test_requested_huge_pages();
    test_full_colors();
    test_smaller_blocks_are_not_spread();
    test_small_pages_are_not_spread();
    in_child(test_prefaults);
    return 0;
}
