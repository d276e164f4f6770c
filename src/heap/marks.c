#include "heap/marks.h"

static void marks_add(struct span *span, unsigned marks) {
    if ((atomic_load_explicit(&span->marks, memory_order_relaxed) & marks) != marks) {
        atomic_fetch_or_explicit(&span->marks, (uint8_t)marks, memory_order_relaxed);
    }
}

/*
 * Returns the span that contains a page, or NULL if none is known. The entries
 * of pages within a large span or a free run are arbitrary, so the search goes
 * back, at worst to the first page of the span. Other threads may change other
 * spans meanwhile. The span of the caller's block does not change, and no two
 * spans in use overlap.
 */
static __attribute__((no_sanitize("thread"))) const struct span *span_around(const struct heap *heap,
                                                                             uint32_t page) {
    const struct space *space = &heap->space;
    for (uint32_t at = page; at > 0; at--) {
        const struct span *span = space_span_of(space, at);
        if (span->state != SPAN_UNUSED && page - span->page < span->pages) {
            return span;
        }
    }
    return NULL;
}

/* Called for each slab and each large block that a range touches, with the part
 * of it that is within the range. */
typedef bool on_block(const struct heap *heap, struct span *span, const char *start, const char *end);

static const char *min_of(const char *a, const char *b) {
    return a < b ? a : b;
}

static __attribute__((no_sanitize("thread"))) bool each_in_segment(const struct heap *heap, const char *start,
                                                                   const char *end, on_block *act) {
    const struct space *space = &heap->space;
    bool done = true;
    while (start < end) {
        uint32_t page = space_page(space, start);
        struct span *span = (struct span *)(uintptr_t)span_around(heap, page);
        size_t pages = span == NULL ? 1 : span->page + span->pages - page;
        const char *page_start = start - ((uintptr_t)start & (space->page_size - 1));
        const char *next = page_start + ((pages == 0 ? 1 : pages) << space->page_shift);
        if (span != NULL && (span->state == SPAN_LARGE || span->state == SPAN_SLAB)) {
            done &= act(heap, span, start, min_of(next, end));
        }
        start = next;
    }
    return done;
}

/* Returns true if all calls of `act` returned true. Starts again if a segment
 * was split meanwhile, so `act` may be called repeatedly for a block. */
static bool each_block(const struct heap *heap, const char *start, size_t bytes, on_block *act) {
    const struct space *space = &heap->space;
    const char *end = start + size_min(bytes, UINTPTR_MAX - (uintptr_t)start);
    bool done;
    size_t splits;
    do {
        splits = atomic_load_explicit(&space->splits, memory_order_acquire);
        size_t count = atomic_load_explicit(&space->segments, memory_order_acquire);
        done = true;
        for (size_t i = 0; i < count; i++) {
            const struct segment *segment = &space->segment[i];
            if (segment->bytes == 0) {
                continue; /* an empty slot */
            }
            const char *base = (const char *)segment->base;
            const char *usable_end =
                base + ((size_t)(segment->page_end - segment->first_page) << space->page_shift);
            done &= each_in_segment(heap, base > start ? base : start, min_of(end, usable_end), act);
        }
    } while (atomic_load_explicit(&space->splits, memory_order_acquire) != splits);
    return done;
}

static bool note(const struct heap *heap, struct span *span, const char *start, const char *end) {
    (void)heap, (void)start, (void)end;
    marks_add(span, MARK_ANY);
    return true;
}

static bool note_absent(const struct heap *heap, struct span *span, const char *start, const char *end) {
    (void)heap, (void)start, (void)end;
    marks_add(span, MARK_ANY | MARK_ABSENT);
    return true;
}

void marks_note(struct heap *heap, const void *start, size_t bytes, unsigned marks) {
    if ((marks & MARK_ABSENT) != 0) {
        heap->has_absent = true;
    }
    each_block(heap, start, bytes, (marks & MARK_ABSENT) != 0 ? note_absent : note);
}

void marks_after_fork(struct heap *heap) {
    for (uint32_t number = 1; heap->has_absent && number < heap->space.spans.end; number++) {
        const struct span *span = span_at(&heap->space.spans, number);
        if ((span->state == SPAN_LARGE || span->state == SPAN_SLAB) && marks_has(span, MARK_ABSENT)) {
            vm_fill_holes(span->base, (size_t)span->pages << heap->space.page_shift);
        }
    }
}

static bool marks_request(const struct heap *heap, struct span *span, const char *start, const char *end) {
    size_t unit = heap->runs.region_pages << heap->space.page_shift;
    char *first = (char *)size_round_up((uintptr_t)start, unit);
    const char *last = (const char *)((uintptr_t)end & ~(unit - 1));
    if (span->state != SPAN_LARGE || first >= last) {
        return true;
    }
    marks_add(span, MARK_HUGE_PAGES);
    return vm_enable_huge_pages(first, (size_t)(last - first));
}

bool marks_request_huge_pages(struct heap *heap, const void *start, size_t bytes) {
    return each_block(heap, start, bytes, marks_request);
}
