/*
 * Marks: notes of what the program did to pages of its own blocks by system
 * calls. Such changes are access rights, advice, locks, and memory policies.
 *
 * The kernel keeps a change for the pages, not for the block. A mark in the
 * descriptor of the block's span notes the change, and the pages are renewed
 * once the block is free. The next owner of the memory is therefore not
 * affected.
 *
 * Any thread and any signal handler may call these functions, as they take no
 * lock. The caller owns the marked blocks.
 */
#ifndef CALM_HEAP_MARKS_H
#define CALM_HEAP_MARKS_H

#include "heap/heap.h"

/* The marks of a span. */
enum mark {
    MARK_HUGE_PAGES = 1, /* large blocks: huge pages were requested where they fit */
    MARK_ANY = 2,        /* any other change: the pages are renewed before they are reused */
    MARK_ABSENT = 4,     /* children do not inherit the pages; always set together with MARK_ANY */
};

/* Marks all blocks that the range touches. Skips pages without a block. */
void marks_note(struct heap *heap, const void *start, size_t bytes, unsigned marks);

/* Called in a forked child before it maps anything. Pages that the child did
 * not inherit stay without access. Otherwise the kernel might map something
 * else in their place, which would be lost when the block is freed. */
void marks_after_fork(struct heap *heap);

/* Requests huge pages for the large blocks in the range, and notes the request.
 * Requests only huge pages that lie within one block, since a touch of others
 * would make pages of a neighbour resident. Returns false if the kernel has
 * none. */
bool marks_request_huge_pages(struct heap *heap, const void *start, size_t bytes);

static inline bool marks_has(const struct span *span, enum mark mark) {
    return (atomic_load_explicit(&span->marks, memory_order_relaxed) & mark) != 0;
}

#endif
