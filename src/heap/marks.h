/*
 * Marks: what a program did to pages of its own blocks by system calls, such as access rights, advice, locks,
 * or a memory policy. The kernel keeps it for the pages, not for the block; so that the next owner of the
 * memory gets none of it, the block's descriptor has a note, and the pages are renewed once the block is
 * free.
 *
 * Any thread and signal handler, whose caller owns the marked blocks: no lock is taken.
 */
#ifndef CALM_HEAP_MARKS_H
#define CALM_HEAP_MARKS_H

#include "heap/heap.h"

/* Of a span. */
enum mark {
    MARK_HUGE_PAGES = 1, /* large: huge pages were requested for those that fit into it */
    MARK_ANY = 2,        /* anything else: its pages are renewed before they are free */
    MARK_ABSENT = 4,     /* in children; beside MARK_ANY */
};

/* Notes that all blocks which the range touches are marked. Pages without a block are passed over. */
void marks_note(struct heap *heap, const void *start, size_t bytes, unsigned marks);

/* In a forked child, before anything is mapped: where pages of blocks are absent nothing else may come, as it
 * would be lost when the block is freed. They stay without access. */
void marks_after_fork(struct heap *heap);

/* Requests huge pages for the large blocks in the range, and notes it. Only for whole ones: a part of one at
 * a block's end would become resident with its neighbour. False if the kernel has none. */
bool marks_request_huge_pages(struct heap *heap, const void *start, size_t bytes);

static inline bool marks_has(const struct span *span, enum mark mark) {
    return (atomic_load_explicit(&span->marks, memory_order_relaxed) & mark) != 0;
}

#endif
