/*
 * A stream of operations on one heap, against a model of its blocks: blocks of size classes and large ones
 * are taken, put, resized and moved, ranges are purged or refused, the program marks pages, and frees what is
 * no block. After the operations, and between them as often as the input says, a walk compares all pages with
 * what the heap says of itself.
 */
#include "blocks.h"
#include "check.h"
#include "heap/large_blocks.h"
#include "heap/marks.h"
#include "heap/purge_batch.h"
#include "heap/slab_blocks.h"
#include "input.h"
#include "kernel.h"
#include "os/purge.h"
#include "walk.h"

#define SLOTS      192
#define MAX_BLOCKS 64                /* taken or put at once */
#define MAX_BYTES  ((size_t)8 << 20) /* of all blocks */
#define MAX_STEPS  4096

static struct size_classes classes;
static struct heap heap;
static struct block slots[SLOTS];
static size_t misuses; /* that were expected */
static struct purge_batch batch;
static bool batch_is_out;
static struct iovec idle[4];
static size_t idle_ranges;
static size_t idle_spans;

static size_t page_size;

/* Pages that could not be renewed are in no count. */
static void walk(void) {
    CHECK_EQUAL(heap.misuses, misuses);
    if (!kernel_has_lost_pages()) {
        heap_walk(&heap, batch_is_out ? &batch : NULL, idle_spans);
    }
}

static bool has_room(size_t bytes) {
    return blocks_sum(slots, SLOTS) + bytes <= MAX_BYTES;
}

static struct block *any_slot(struct input *input) {
    return &slots[input_below(input, SLOTS)];
}

/* The next slot of a large block in use, from one that the input names; NULL: there is none. */
static struct block *any_large(struct input *input) {
    size_t first = input_below(input, SLOTS);
    for (size_t i = 0; i < SLOTS; i++) {
        struct block *slot = &slots[(first + i) % SLOTS];
        if (slot->start != NULL && slot->size_class == 0) {
            return slot;
        }
    }
    return NULL;
}

static struct block *empty_slot(void) {
    for (size_t i = 0; i < SLOTS; i++) {
        if (slots[i].start == NULL) {
            return &slots[i];
        }
    }
    return NULL;
}

static void take_small(struct input *input) {
    uint32_t size_class = 1 + (uint32_t)input_below(input, classes.count - 1);
    size_t wanted = 1 + input_below(input, MAX_BLOCKS);
    void *blocks[MAX_BLOCKS];
    if (!has_room(wanted * classes.of[size_class].size)) {
        return;
    }
    size_t got = heap_take_blocks(&heap, size_class, blocks, wanted);
    CHECK(got <= wanted);
    size_t kept = 0;
    for (struct block *slot; kept < got && (slot = empty_slot()) != NULL; kept++) {
        CHECK_EQUAL(heap_class_at(&heap, blocks[kept]), size_class);
        blocks_add(slots, SLOTS, slot, blocks[kept], classes.of[size_class].size, SIZE_QUANTUM);
        slot->size_class = size_class;
    }
    heap_put_blocks(&heap, blocks + kept, got - kept);
}

static void take_large(struct input *input) {
    static const enum run_choice choices[] = {RUN_FOR_ANY, RUN_FOR_LARGE, RUN_FOR_SPARSE, RUN_FOR_MOVE,
                                              RUN_FOR_HUGE_PAGES};
    size_t pages = input_size(input, 10);
    unsigned detail = input_byte(input);
    size_t align_pages = (detail & 8) != 0 ? (size_t)1 << (detail >> 4 & 7) : 1;
    enum run_choice choice = choices[(detail & 7) % (heap.runs.region_pages > 0 ? 5 : 4)];
    struct block *slot = empty_slot();
    if (slot == NULL || pages == 0 || !has_room(pages * page_size)) {
        return;
    }
    bool zero = false;
    char *block = heap_take_large(&heap, pages, align_pages, choice, (detail & 128) != 0, &zero);
    if (block == NULL) {
        return;
    }
    struct span *span = heap_large_span(&heap, block);
    CHECK(span != NULL && span->base == block);
    CHECK_EQUAL(span->pages, pages);
    if (zero) {
        blocks_check_zero(block, pages * page_size);
    } else if ((detail & 4) != 0) {
        heap_note_guess(&heap, span);
    }
    blocks_add(slots, SLOTS, slot, block, pages * page_size, align_pages * page_size);
    slot->size_class = 0;
}

static void renew(struct span *span) {
    if (span != NULL) {
        heap_put_renewed(&heap, span, vm_renew(span->base, span->pages * page_size));
    }
}

/* Frees blocks: small ones together, as planned or under the lock; large ones each by itself. */
static void put_some(struct input *input) {
    size_t count = 1 + input_below(input, MAX_BLOCKS);
    unsigned detail = input_byte(input);
    size_t stride = 1 + (detail >> 2 & 15);
    size_t at = input_below(input, SLOTS);
    void *blocks[MAX_BLOCKS];
    size_t small = 0;
    for (size_t i = 0; i < count; i++, at += stride) {
        struct block *slot = &slots[at % SLOTS];
        if (slot->start == NULL) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        if (slot->size_class == 0) {
            renew(heap_put_large(&heap, slot->start));
        } else {
            blocks[small++] = slot->start;
        }
        slot->start = NULL;
    }
    if ((detail & 1) == 0) {
        heap_put_blocks(&heap, blocks, small);
        return;
    }
    struct heap_puts puts;
    heap_plan_puts(&heap, &puts, blocks, small);
    heap_put_planned(&heap, &puts, blocks, small);
}

static void resize(struct input *input) {
    struct block *slot = any_large(input);
    size_t pages = input_size(input, 10);
    if (slot == NULL || pages == 0 || !has_room(pages * page_size)) {
        return;
    }
    struct span *span = heap_large_span(&heap, slot->start);
    CHECK(span != NULL);
    size_t held = slot->bytes;
    bool resized = heap_resize_large(&heap, span, pages);
    CHECK(heap_large_span(&heap, slot->start) == span);
    slot->bytes = span->pages * page_size;
    if (!resized) {
        CHECK_EQUAL(slot->bytes, held);
    } else {
        CHECK(span->pages >= pages);
        CHECK(span->pages == pages || slot->bytes == held);
    }
    struct block before = {slot->start, held, slot->mark, 0};
    blocks_check(&before, slot->bytes < held ? slot->bytes : held);
    struct block now = *slot;
    blocks_add(slots, SLOTS, slot, now.start, now.bytes, page_size);
}

static void move(struct input *input) {
    struct block *slot = any_large(input);
    size_t more = input_below(input, 8);
    if (slot == NULL || !heap_may_move(&heap) || !has_room(slot->bytes + more * page_size)) {
        return;
    }
    struct span *span = heap_large_span(&heap, slot->start);
    bool zero;
    size_t pages = span->pages + more;
    char *to = heap_take_large(&heap, pages, 1, RUN_FOR_MOVE, false, &zero);
    if (to == NULL) {
        return;
    }
    if (!vm_move_pages(slot->start, to, slot->bytes)) {
        renew(heap_put_large(&heap, to));
        return;
    }
    heap_moved(&heap, span, heap_large_span(&heap, to));
    slot->start = (unsigned char *)to;
    blocks_check(slot, slot->bytes);
    blocks_add(slots, SLOTS, slot, to, pages * page_size, page_size);
}

/* Takes a batch out; or purges it, or as much of it as the kernel allows, and puts it back. */
static void purge(struct input *input) {
    size_t pages = input_size(input, 12);
    enum purge_depth depth = (enum purge_depth)input_below(input, 3);
    if (!batch_is_out) {
        size_t before = heap_dirty_pages(&heap);
        size_t used = heap_used_pages(&heap);
        size_t taken = heap_take_dirty(&heap, &batch, pages > 4096 ? SIZE_MAX : pages, depth);
        CHECK_EQUAL(taken, batch.pages);
        CHECK(heap_dirty_pages(&heap) <= before - taken);
        CHECK_EQUAL(heap_used_pages(&heap), used);
        batch_is_out = true;
        return;
    }
    struct purge_result result = purge_ranges(batch.ranges, batch.count);
    CHECK(result.ranges_done <= batch.count);
    for (size_t i = 0; i < result.ranges_done; i++) {
        blocks_check_zero(batch.ranges[i].iov_base, batch.ranges[i].iov_len);
    }
    purge_batch_refuse(&batch, result.ranges_done, batch.count);
    heap_put_back(&heap, &batch);
    batch_is_out = false;
}

/* What a program does to pages of its block; the kernel may refuse it. */
static void mark(struct input *input) {
    struct block *slot = any_slot(input);
    unsigned detail = input_byte(input);
    if (slot->start == NULL) {
        return;
    }
    size_t skip = slot->bytes / 256 * (detail >> 2 & 31);
    if ((detail & 1) == 0) {
        marks_note(&heap, slot->start + skip, slot->bytes - skip, MARK_ANY);
    } else if (heap.runs.region_pages > 0) {
        marks_request_huge_pages(&heap, slot->start + skip, slot->bytes - skip);
    }
}

/* Frees of what is no block: recorded, and without effect. */
static void misuse(struct input *input) {
    struct block *slot = any_slot(input);
    size_t inside = input_size(input, 20);
    unsigned detail = input_byte(input);
    char *pointer = (char *)&heap;
    if (slot->start != NULL && slot->bytes > 1) {
        pointer = (char *)slot->start + 1 + inside % (slot->bytes - 1);
        bool is_block = false;
        for (size_t i = 0; i < SLOTS; i++) {
            is_block |= (char *)slots[i].start == pointer;
        }
        CHECK(!is_block);
    } else if ((detail & 2) != 0) {
        pointer = NULL;
    }
    if ((detail & 1) == 0) {
        void *one = pointer;
        heap_put_blocks(&heap, &one, 1);
    } else {
        CHECK(heap_put_large(&heap, pointer) == NULL);
    }
    misuses++;
    CHECK_EQUAL(heap.misuses, misuses);
    CHECK_EQUAL(heap.misuse[(misuses - 1) % MISUSE_RECORDS].kind, MISUSE_INVALID_FREE);
}

/* The descriptors on a range, which describe nothing. */
static size_t idle_on(const struct iovec *range) {
    const struct span_table *table = &heap.space.spans;
    size_t offset = (size_t)((char *)range->iov_base - table->memory[TABLE_SPANS].base);
    size_t end = (offset + range->iov_len + table->span_bytes - 1) / table->span_bytes;
    size_t first = offset / table->span_bytes;
    for (size_t number = first; number < end; number++) {
        CHECK_EQUAL(span_at(table, (uint32_t)number)->state, SPAN_UNUSED);
    }
    return end - first;
}

static void purge_descriptors(void) {
    if (idle_ranges > 0) {
        purge_ranges(idle, idle_ranges);
        span_table_put_idle(&heap.space.spans, idle, idle_ranges);
        idle_ranges = idle_spans = 0;
        return;
    }
    idle_ranges = span_table_take_idle(&heap.space.spans, idle, sizeof idle / sizeof idle[0]);
    for (size_t i = 0; i < idle_ranges; i++) {
        idle_spans += idle_on(&idle[i]);
    }
}

/* What the arena does with clean runs where address space is limited, and when the program does so. */
static void limit(struct input *input) {
    unsigned detail = input_byte(input);
    if ((detail & 3) == 0) {
        size_t bytes = (size_t)1 << (24 + input_below(input, 8));
        kernel_limit(bytes);
        space_limit(&heap.space, bytes);
    } else {
        runs_release(&heap.runs, (detail & 2) != 0);
        if ((detail & 4) != 0) {
            runs_retract(&heap.runs);
        }
    }
}

static void step(struct input *input) {
    switch (input_byte(input) % 16) {
    case 0:
    case 1:
    case 2:
        take_small(input);
        break;
    case 3:
    case 4:
        take_large(input);
        break;
    case 5:
    case 6:
    case 7:
        put_some(input);
        break;
    case 8:
        resize(input);
        break;
    case 9:
        move(input);
        break;
    case 10:
    case 11:
        purge(input);
        break;
    case 12:
        mark(input);
        break;
    case 13:
        misuse(input);
        break;
    case 14:
        if ((input_byte(input) & 1) == 0) {
            purge_descriptors();
        } else {
            limit(input);
        }
        break;
    default:
        kernel_refuse((uint32_t)input_number(input, 2));
    }
}

/* Everything is freed and purged: no page is in use or dirty. */
static void end(void) {
    kernel_refuse(0);
    if (batch_is_out) {
        purge_batch_refuse(&batch, 0, batch.count);
        heap_put_back(&heap, &batch);
        batch_is_out = false;
    }
    for (size_t i = 0; i < SLOTS; i++) {
        struct block *slot = &slots[i];
        if (slot->start == NULL) {
            continue;
        }
        blocks_check(slot, slot->bytes);
        if (slot->size_class == 0) {
            renew(heap_put_large(&heap, slot->start));
        } else {
            void *one = slot->start;
            heap_put_blocks(&heap, &one, 1);
        }
        slot->start = NULL;
    }
    walk();
    CHECK_EQUAL(heap_used_pages(&heap), 0);
    while (heap_take_dirty(&heap, &batch, SIZE_MAX, PURGE_SPLIT) > 0) {
        CHECK_EQUAL(purge_ranges(batch.ranges, batch.count).ranges_done, batch.count);
        heap_put_back(&heap, &batch);
    }
    walk();
    CHECK_EQUAL(heap_dirty_pages(&heap), 0);
}

static bool start(struct input *input) {
    static const size_t spaces[] = {(size_t)8 << 20, (size_t)64 << 20, (size_t)1 << 30, (size_t)1 << 40};
    page_size = vm_page_size();
    if (classes.count == 0) {
        size_classes_fill(&classes, page_size);
    }
    unsigned detail = input_byte(input);
    if ((detail & 4) != 0) {
        kernel_limit((size_t)8 << (20 + input_below(input, 8)));
    }
    memset(&heap, 0, sizeof heap);
    if (!heap_init(&heap, &classes, spaces[detail & 3])) {
        return false;
    }
    size_t region_pages = (detail & 8) != 0 ? 16 : 0;
    heap.runs.region_pages = region_pages;
    if (region_pages > 0 && (detail & 16) != 0) {
        size_t color_bytes = region_pages / 2 * page_size;
        unsigned ways = 1 + (detail >> 5 & 1);
        const struct hardware_cache cache = {.level = 2,
                                             .bytes = ways * color_bytes,
                                             .ways = ways,
                                             .line_bytes = 64,
                                             .sets = color_bytes / 64,
                                             .cpus = 1};
        colors_init(&heap.colors, &cache, 1, page_size, region_pages * page_size, 0);
    }
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t count) {
    struct input input = {bytes, count};
    memset(slots, 0, sizeof slots);
    misuses = 0;
    batch_is_out = false;
    idle_ranges = idle_spans = 0;
    static const size_t steps_per_walk[] = {1, 4, 16, MAX_STEPS};
    size_t period = steps_per_walk[input_byte(&input) & 3];
    if (start(&input)) {
        for (size_t i = 1; input.left > 0 && i < MAX_STEPS; i++) {
            step(&input);
            if (i % period == 0) {
                walk();
            }
        }
        if (idle_ranges > 0) {
            purge_descriptors();
        }
        walk();
        end();
    }
    kernel_reset();
    return 0;
}
