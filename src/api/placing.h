/*
 * Where a new large block begins in its first page: the process's turn, and what it may cost.
 *
 * For allocator.c. Thread-safe; takes no lock: the block is its caller's alone, whoever drives the heap.
 */
#ifndef CALM_API_PLACING_H
#define CALM_API_PLACING_H

#include <stddef.h>

/* Pages that a block is to have beyond those of its size: 1 where its last page has no room for a later
 * beginning and the block is so large that a page is little; else 0. */
size_t placing_pages(size_t size, size_t alignment);

/* Has a large block, new and not placed yet, begin where it should for its size. Returns where. */
void *placing_place(void *base, size_t size, size_t alignment);

/* In the child: it places otherwise than its parent, and its siblings. */
void placing_after_fork(void);

#endif
