#include "heap/large_blocks.h"

#include "base/assert.h"
#include "base/size.h"
#include "heap/marks.h"

/* The kernel keeps a mapping for each moved block. This limit and the one on
 * huge-page regions leave half of a process's mappings to the program. */
#define MAX_MOVED_SPANS 16384

void *heap_take_large(struct heap *heap, size_t pages, size_t align_pages, enum run_choice choice,
                      bool colored, bool *zero) {
    calm_assert(pages > 0 && align_pages > 0, pages, align_pages);
    uint64_t made = heap->runs.huge_pages_made;
    /* Pages skipped between smaller blocks would be holes that fit no block
     * (docs/experiments.md). */
    colored = colored && pages >= heap->runs.region_pages;
    struct span *span =
        runs_take(&heap->runs, pages, align_pages, choice, colored ? &heap->colors : NULL, zero);
    heap->dirtied_pages += heap->runs.huge_pages_made - made;
    if (span == NULL) {
        return NULL;
    }
    calm_assert(span->state == SPAN_TAKEN && span->pages == pages && !marks_has(span, 0xff), span->page,
                pages);
    /* Pages that are moved to a block cause no faults. */
    heap->runs.faulted_pages += *zero && choice != RUN_FOR_MOVE ? pages : 0;
    heap->runs.sparse_pages += *zero && choice == RUN_FOR_SPARSE ? pages : 0;
    span->state = SPAN_LARGE;
    span->offset = 0;
    span->colored = span->huge && colored;
    if (span->colored) {
        colors_add(&heap->colors, runs_address_page(&heap->runs, span));
    }
    span->moved = false;
    span->guessed = false;
    span->fresh = *zero && !span->huge && choice != RUN_FOR_MOVE;
    heap->used_pages += pages;
    heap->large_allocations++;
    return span->base;
}

/* Must be called before the size of the block changes. */
static void end_guess(struct heap *heap, struct span *span) {
    calm_assert(!span->guessed || heap->guessed_pages >= span->pages, span->page, heap->guessed_pages);
    heap->guessed_pages -= span->guessed ? span->pages : 0;
    span->guessed = false;
}

/* Takes the block out of its span. */
static void leave_span(struct heap *heap, struct span *span) {
    calm_assert(span->state == SPAN_LARGE, span->page, span->state);
    calm_assert(heap->used_pages >= span->pages && heap->moved_spans >= span->moved, span->page);
    end_guess(heap, span);
    if (span->colored) {
        colors_remove(&heap->colors, runs_address_page(&heap->runs, span));
    }
    span->colored = false;
    atomic_store_explicit(&span->marks, 0, memory_order_relaxed);
    span->state = SPAN_TAKEN;
    heap->used_pages -= span->pages;
    heap->moved_spans -= span->moved;
}

void heap_note_guess(struct heap *heap, struct span *span) {
    calm_assert(span->state == SPAN_LARGE && !span->guessed, span->page);
    span->guessed = true;
    heap->guessed_pages += span->pages;
}

struct span *heap_large_span_at(const struct heap *heap, const void *address) {
    uint32_t page = space_page(&heap->space, address);
    if (page == 0 || !space_is_usable(&heap->space, page)) {
        return NULL;
    }
    struct span *span = space_span_of(&heap->space, page);
    return span->state == SPAN_LARGE && span->page == page ? span : NULL;
}

struct span *heap_large_span(const struct heap *heap, const void *block) {
    struct span *span = heap_large_span_at(heap, block);
    return span != NULL && span->base + span->offset == block ? span : NULL;
}

/* Puts a span that may have marks. Returns false if the pages may not be reused
 * as they are. The caller must then renew them. */
static bool put_marked(struct heap *heap, struct span *span, unsigned marks) {
    calm_assert(span->state == SPAN_TAKEN, span->page, span->state);
    heap->dirtied_pages += span->pages;
    if ((marks & MARK_ANY) == 0) {
        if ((marks & MARK_HUGE_PAGES) == 0 || span->huge) {
            runs_put(&heap->runs, span, false);
            return true;
        }
        if (runs_put_as_regions(&heap->runs, span)) {
            return true;
        }
    }
    heap->purging_pages += span->pages;
    return false;
}

struct span *heap_put_large(struct heap *heap, void *block) {
    struct span *span = heap_large_span(heap, block);
    if (span == NULL) {
        heap_note_wild_free(heap, block);
        return NULL;
    }
    unsigned marks = atomic_load_explicit(&span->marks, memory_order_relaxed) | (span->moved ? MARK_ANY : 0);
    leave_span(heap, span);
    return put_marked(heap, span, marks) ? NULL : span;
}

void heap_put_renewed(struct heap *heap, struct span *span, enum vm_renewed renewed) {
    calm_assert(span->state == SPAN_TAKEN && heap->purging_pages >= span->pages, span->page, span->state);
    heap->purging_pages -= span->pages;
    if (renewed == VM_UNUSABLE) {
        span->state = SPAN_LOST;
        return;
    }
    if (span->huge) {
        size_t skip;
        size_t regions = runs_whole_regions(&heap->runs, span, &skip) / heap->runs.region_pages;
        heap->runs.regions -= size_min(heap->runs.regions, regions);
    }
    span->huge = false;
    runs_put(&heap->runs, span, renewed == VM_RENEWED);
}

/* The pages of a moved block can only be returned as a whole. If such a block
 * shrinks to half or less, the function returns false, and the caller copies
 * the block. Otherwise the block keeps its size. */
static bool large_block_shrink(struct heap *heap, struct span *span, size_t pages) {
    calm_assert(pages > 0 && pages < span->pages, span->page, pages);
    if (span->moved) {
        return pages > span->pages / 2;
    }
    struct span *rest = runs_split(&heap->runs, span, pages);
    if (rest == NULL) {
        return true; /* the block keeps its size, which is at least the requested one */
    }
    heap->used_pages -= rest->pages;
    space_mark_ends(&heap->space, span);
    rest->state = SPAN_TAKEN;
    if (!put_marked(heap, rest, atomic_load_explicit(&span->marks, memory_order_relaxed))) {
        size_t bytes = (size_t)rest->pages << heap->space.page_shift;
        heap_put_renewed(heap, rest, vm_renew(rest->base, bytes));
    }
    return true;
}

static bool large_block_extend(struct heap *heap, struct span *span, size_t more) {
    struct span *next = runs_next(&heap->runs, span);
    uint32_t end = next == NULL ? span->page + span->pages : next->page + next->pages;
    if ((next == NULL || next->pages < more) && space_ends_at(&heap->space, end) &&
        runs_extend(&heap->runs, more) != NULL) {
        next = runs_next(&heap->runs, span);
    }
    /* One touch of clean pages would make a whole huge-page region resident,
     * which is more than the block takes. */
    bool clean = next != NULL && next->state == SPAN_CLEAN;
    if (next == NULL || next->pages < more || next->huge != span->huge || (next->huge && clean)) {
        return false;
    }
    next = runs_carve(&heap->runs, next, 0, more);
    if (next == NULL) {
        return false;
    }
    calm_assert(next->page == span->page + span->pages && next->pages == more, span->page, next->page, more);
    span->pages += next->pages;
    heap->used_pages += more;
    heap->runs.faulted_pages += clean ? more : 0;
    span_table_drop(&heap->space.spans, next);
    space_mark_ends(&heap->space, span);
    return true;
}

bool heap_resize_large(struct heap *heap, struct span *span, size_t pages) {
    calm_assert(span->state == SPAN_LARGE && pages > 0, span->page, span->state);
    if (pages == span->pages) {
        return true;
    }
    span->fresh = false;
    end_guess(heap, span);
    return pages < span->pages ? large_block_shrink(heap, span, pages)
                               : large_block_extend(heap, span, pages - span->pages);
}

void heap_moved(struct heap *heap, struct span *from, struct span *to) {
    calm_assert(from->state == SPAN_LARGE && to->state == SPAN_LARGE && from != to, from->page, to->page);
    calm_assert(from->pages <= to->pages, from->pages, to->pages);
    /* No huge pages were requested for `to`, so it does not get their mark. The
     * pages of a moved block are renewed in any case once the block is free. */
    unsigned marks = atomic_load_explicit(&from->marks, memory_order_relaxed) & ~(unsigned)MARK_HUGE_PAGES;
    atomic_store_explicit(&to->marks, (uint8_t)marks, memory_order_relaxed);
    leave_span(heap, from);
    to->moved = true;
    to->offset = from->offset;
    heap->moves++;
    heap->moved_spans++;
    from->moved = false;
    runs_put(&heap->runs, from, true);
}

bool heap_may_move(const struct heap *heap) {
    return heap->moved_spans < MAX_MOVED_SPANS;
}
