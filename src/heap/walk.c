#include "heap/walk.h"

#include "base/assert.h"

/* The tests walk heaps in builds without assertions, too. */
#if defined(CALM_ASSERTIONS) || defined(CALM_WALK)

#include "heap/large_blocks.h"
#include "heap/slab.h"
#include "heap/slab_blocks.h"

#include <string.h>

#define check_equal(a, b) calm_check((uint64_t)(a) == (uint64_t)(b), a, b)

static bool walk_is_free(const struct span *span) {
    return span->state == SPAN_DIRTY || span->state == SPAN_CLEAN;
}

static enum run_kind walk_kind(const struct span *span) {
    return (span->state == SPAN_CLEAN ? RUN_CLEAN : RUN_DIRTY) + (span->huge ? RUN_HUGE_DIRTY : 0);
}

/* Calls `each` for all spans in an order by address. Checks that each span lies
 * higher than its parent. Not recursive, since the order may be as deep as
 * there are spans, and stacks are small. */
static size_t walk_order(const struct span *root, void (*each)(void *context, const struct span *span),
                         void *context) {
    size_t count = 0;
    const struct span *span = root;
    calm_check(root == NULL || (root->next == NULL && root->previous == NULL));
    while (span != NULL) {
        calm_check(span->child == NULL || span->child->previous == span, span->page);
        calm_check(span->next == NULL || span->next->previous == span, span->page);
        for (const struct span *child = span->child; child != NULL; child = child->next) {
            calm_check(child->page > span->page, child->page, span->page);
        }
        each(context, span);
        count++;
        if (span->child != NULL) {
            span = span->child;
            continue;
        }
        while (span != root && span->next == NULL) {
            while (span->previous->child != span) {
                span = span->previous;
            }
            span = span->previous; /* the parent */
        }
        span = span == root ? NULL : span->next;
    }
    return count;
}

static void walk_slab(const struct heap *heap, const struct span *slab, struct heap_walk *walk) {
    const struct space *space = &heap->space;
    const struct size_class *size_class = &heap->classes->of[slab->size_class];
    static uint16_t users[UINT16_MAX];
    uint32_t number = span_number(&space->spans, slab);
    calm_check(slab->size_class >= 1 && slab->size_class < heap->classes->count);
    check_equal(slab->pages, size_class->slab_pages);
    memset(users, 0, slab->pages * sizeof *users);
    size_t used = 0;
    size_t bits = (space->spans.span_bytes - sizeof *slab) * 8;
    for (size_t block = 0; block < bits; block++) {
        if (!slab_has(slab, block)) {
            continue;
        }
        calm_check(block < size_class->slab_blocks);
        used++;
        size_t first = block * size_class->size >> space->page_shift;
        size_t last = ((block + 1) * size_class->size - 1) >> space->page_shift;
        for (size_t page = first; page <= last; page++) {
            users[page]++;
        }
    }
    check_equal(slab->used_blocks, used);
    calm_check(used > 0); /* an empty slab becomes free runs */
    size_t free_dirty = 0;
    for (size_t page = 0; page < slab->pages; page++) {
        uint16_t word = space->users_of[slab->page + page];
        check_equal(word & PAGE_USERS, users[page]);
        check_equal(space->span_of[slab->page + page], number);
        check_equal(space->class_of[slab->page + page], slab->size_class);
        walk->slab_used_pages += users[page] > 0;
        free_dirty += word == PAGE_DIRTY;
    }
    check_equal(slab->free_dirty_pages, free_dirty);
    walk->slab_dirty_pages += free_dirty;
    walk->slabs_with_dirty += free_dirty > 0;
    walk->used_blocks += used;
    walk->slabs++;
}

static void walk_span(const struct heap *heap, const struct span *span, struct heap_walk *walk) {
    switch (span->state) {
    case SPAN_DIRTY:
    case SPAN_CLEAN:
        walk->runs[walk_kind(span)]++;
        walk->run_pages[walk_kind(span)] += span->pages;
        break;
    case SPAN_TAKEN:
        walk->purging_pages += span->pages;
        break;
    case SPAN_LARGE:
        walk->large_blocks++;
        walk->moved_blocks += span->moved;
        walk->large_pages += span->pages;
        break;
    case SPAN_SLAB:
        walk_slab(heap, span, walk);
        break;
    case SPAN_LOST:
        break;
    default:
        calm_check(!"a span in use");
    }
}

/* Returns whether two neighbours should have been merged. Whole huge-page
 * regions may be adjacent without being merged, at no cost. */
static bool walk_may_join(const struct heap *heap, const struct span *before, const struct span *span) {
    if (!walk_is_free(before) || !walk_is_free(span) || walk_kind(before) != walk_kind(span)) {
        return false;
    }
    size_t region = heap->runs.region_pages << heap->space.page_shift;
    return !span->huge || (uintptr_t)span->base % region != 0;
}

/* Checks every usable page of a segment, in order. */
static void walk_segment(const struct heap *heap, const struct segment *segment, struct heap_walk *walk) {
    const struct space *space = &heap->space;
    uint32_t page = segment->first_page;
    uint32_t end = page + (uint32_t)(segment->region.committed >> space->page_shift);
    const struct span *before = NULL;
    while (page < end) {
        const struct span *span = space_span_of(space, page);
        check_equal(span->page, page);
        calm_check(span->pages > 0 && span->pages <= end - page);
        calm_check(span->base == space_address(space, page));
        check_equal(space_page(space, span->base), page);
        check_equal(space->span_of[page + span->pages - 1], space->span_of[page]);
        calm_check(before == NULL || !walk_may_join(heap, before, span));
        for (uint32_t i = page; span->state != SPAN_SLAB && i < page + span->pages; i++) {
            check_equal(space->class_of[i], 0);
            check_equal(space->users_of[i], 0);
        }
        walk_span(heap, span, walk);
        walk->spans++;
        page += span->pages;
        before = span;
    }
}

struct walk_set {
    const struct heap *heap;
    size_t pages;
    enum run_kind kind;
    uint32_t size_class;
};

static void walk_bin_run(void *context, const struct span *span) {
    struct walk_set *set = context;
    calm_check(walk_is_free(span));
    check_equal(walk_kind(span), set->kind);
    calm_check(space_span_of(&set->heap->space, span->page) == span);
    set->pages += span->pages;
}

static void walk_run_set(const struct heap *heap, enum run_kind kind, size_t runs, size_t pages) {
    const struct run_set *set = &heap->runs.sets[kind];
    struct walk_set found = {heap, 0, kind, 0};
    size_t count = 0;
    for (unsigned bin = 0; bin < RUN_BINS; bin++) {
        check_equal(set->filled[bin / 64] >> (bin % 64) & 1, set->bins[bin] != NULL);
        count += walk_order(set->bins[bin], walk_bin_run, &found);
    }
    check_equal(count, runs);
    check_equal(found.pages, pages);
    check_equal(set->pages, pages);
}

static void walk_part_used(void *context, const struct span *slab) {
    struct walk_set *bin = context;
    check_equal(slab->state, SPAN_SLAB);
    check_equal(slab->size_class, bin->size_class);
    calm_check(slab != bin->heap->bins[bin->size_class].current);
    calm_check(slab->used_blocks < bin->heap->classes->of[slab->size_class].slab_blocks);
}

/* Checks that each slab with a free block is in its bin, where the heap looks
 * for one. */
static void walk_bins(const struct heap *heap) {
    size_t found = 0;
    size_t wanted = 0;
    for (uint32_t size_class = 1; size_class < heap->classes->count; ++size_class) {
        struct walk_set bin = {heap, 0, RUN_KINDS, size_class};
        const struct span *current = heap->bins[size_class].current;
        calm_check(current == NULL || (current->state == SPAN_SLAB && current->size_class == size_class));
        found += walk_order(heap->bins[size_class].part_used, walk_part_used, &bin);
        found += current != NULL && current->used_blocks < heap->classes->of[size_class].slab_blocks;
    }
    for (uint32_t number = 1; number < heap->space.spans.end; number++) {
        const struct span *span = span_at(&heap->space.spans, number);
        wanted +=
            span->state == SPAN_SLAB && span->used_blocks < heap->classes->of[span->size_class].slab_blocks;
    }
    check_equal(found, wanted);
}

static size_t walk_ages(const struct span_ages *ages, bool (*belongs)(const struct span *span)) {
    size_t count = 0;
    const struct span *colder = NULL;
    for (const struct span *span = ages->coldest; span != NULL; span = span->age.hotter) {
        calm_check(span->age.colder == colder);
        calm_check(belongs(span));
        colder = span;
        count++;
    }
    calm_check(ages->hottest == colder);
    return count;
}

static bool walk_is_dirty_run(const struct span *span) {
    return span->state == SPAN_DIRTY;
}

static bool walk_is_dirty_slab(const struct span *span) {
    return span->state == SPAN_SLAB && span->free_dirty_pages > 0;
}

/* Checks the bits of unused descriptors, and the bits of the words that contain
 * those. */
static void walk_descriptors(const struct heap *heap, size_t spans, size_t idle) {
    const struct span_table *table = &heap->space.spans;
    const struct address_range *free_spans = &table->memory[TABLE_FREE_SPANS];
    const uint64_t *words = (const uint64_t *)(const void *)table->memory[TABLE_FREE_WORDS].base;
    const uint64_t *bits = (const uint64_t *)(const void *)free_spans->base;
    size_t unused = 0;
    for (size_t row = 0; row * 64 < table->end && row * 8 < free_spans->committed; row++) {
        unused += (size_t)__builtin_popcountll(bits[row]);
        check_equal(words[row / 64] >> (row % 64) & 1, bits[row] != 0);
        calm_check(bits[row] == 0 || table->lowest_free_word <= row / 64);
        for (uint64_t left = bits[row]; left != 0; left &= left - 1) {
            size_t number = row * 64 + (size_t)__builtin_ctzll(left);
            calm_check(number > 0 && number < table->end);
            check_equal(span_at(table, (uint32_t)number)->state, SPAN_UNUSED);
        }
    }
    check_equal(table->unused, unused);
    check_equal(table->end - 1, spans + unused + idle);
}

/* Checks that heap->colors counts the colored blocks in the heap, and no
 * others. */
static void walk_colors(const struct heap *heap) {
    static size_t blocks[MAX_HARDWARE_CACHES][MAX_COLORS];
    size_t all = 0;
    memset(blocks, 0, sizeof blocks);
    for (uint32_t number = 1; number < heap->space.spans.end; number++) {
        const struct span *span = span_at(&heap->space.spans, number);
        if (span->state == SPAN_LARGE && span->colored) {
            calm_check(span->huge);
            for (size_t i = 0; i < heap->colors.count; i++) {
                uint64_t page = runs_address_page(&heap->runs, span);
                blocks[i][page % heap->colors.caches[i].colors]++;
            }
            all++;
        }
    }
    check_equal(heap->colors.blocks, all);
    for (size_t i = 0; i < heap->colors.count; i++) {
        for (size_t color = 0; color < heap->colors.caches[i].colors; color++) {
            check_equal(heap->colors.caches[i].blocks[color], blocks[i][color]);
        }
    }
}

struct heap_walk heap_walk(const struct heap *heap, const struct purge_batch *batch, size_t idle) {
    struct heap_walk walk = {0};
    size_t segments = atomic_load(&heap->space.segments);
    for (size_t i = 0; i < segments; i++) {
        walk_segment(heap, &heap->space.segment[i], &walk);
    }
    for (size_t i = 0; batch != NULL && i < batch->count; i++) {
        const struct span *span = purge_batch_span(heap, &batch->ranges[i]);
        if (span->state == SPAN_SLAB) {
            walk.purging_pages += batch->ranges[i].iov_len >> heap->space.page_shift;
        } else {
            check_equal(span->state, SPAN_TAKEN);
        }
    }
    for (unsigned kind = 0; kind < RUN_KINDS; kind++) {
        walk_run_set(heap, (enum run_kind)kind, walk.runs[kind], walk.run_pages[kind]);
    }
    walk_bins(heap);
    check_equal(walk_ages(&heap->runs.dirty_ages, walk_is_dirty_run),
                walk.runs[RUN_DIRTY] + walk.runs[RUN_HUGE_DIRTY]);
    check_equal(walk_ages(&heap->slab_ages[false], walk_is_dirty_slab) +
                    walk_ages(&heap->slab_ages[true], walk_is_dirty_slab),
                walk.slabs_with_dirty);
    walk_colors(heap);
    walk_descriptors(heap, walk.spans, idle);
    check_equal(heap->used_pages, walk.large_pages + walk.slab_used_pages);
    calm_check(batch != NULL || heap->claimed_pages == 0);
    check_equal(heap->slab_dirty_pages, walk.slab_dirty_pages);
    check_equal(heap_dirty_pages(heap),
                walk.run_pages[RUN_DIRTY] + walk.run_pages[RUN_HUGE_DIRTY] + walk.slab_dirty_pages);
    check_equal(heap->purging_pages, walk.purging_pages);
    check_equal(heap->moved_spans, walk.moved_blocks);
    return walk;
}

#endif
