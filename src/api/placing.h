/*
 * Where a new large block begins in its first page. Called by allocator.c for a block that its caller alone
 * knows. Thread-safe, without a lock or a word that all CPUs write.
 */
#ifndef CALM_API_PLACING_H
#define CALM_API_PLACING_H

#include "api/state.h"

#include <stddef.h>

/* Pages that a block is to have beyond those of its size: 1 if its last page has no room for a later start
 * and the block is large compared to a page; else 0. */
size_t placing_pages(const struct allocator *allocator, size_t size, size_t alignment);

/* Places a new large block, whose span begins at base, by its size. Returns where it begins. */
void *placing_place(const struct allocator *allocator, const struct heap *heap, void *base, size_t size,
                    size_t alignment);

/* In the child, which places blocks differently from its parent and its siblings. */
void placing_after_fork(void);

#endif
