/*
 * Where a new large block starts in its first page. allocator.c calls these
 * functions before another thread knows the block. They are thread-safe,
 * without a lock or a word that all CPUs write.
 */
#ifndef CALM_API_PLACING_H
#define CALM_API_PLACING_H

#include "api/instance.h"

#include <stddef.h>

/* Returns the number of pages that a block gets beyond its size. This is 1 if
 * its last page has no room for a later start, and the block is large compared
 * to a page; otherwise 0. */
size_t placing_pages(size_t size, size_t alignment);

/* Places a new large block whose span starts at `base`. Returns where the block
 * starts. */
void *placing_place(void *base, size_t size, size_t alignment);

/* Called in a forked child, which then places blocks differently from its
 * parent and its siblings. */
void placing_after_fork(void);

#endif
