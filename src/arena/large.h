/* Large blocks. This file chooses the pages of a new block by what the THP
 * policy expects of the block, and grows, shrinks and moves blocks.
 * Thread-safe. */
#ifndef CALM_ARENA_LARGE_H
#define CALM_ARENA_LARGE_H

#include "arena/state.h"

/* Takes a block of whole pages. Returns NULL if memory is short. `*zero` says
 * whether the block is known to be zero. `zeroed` says that the caller will
 * clear the block if it is not. */
void *arena_take_large(struct arenas *arenas, size_t pages, size_t align_pages, bool zeroed, bool *zero);

void arena_put_large(struct arenas *arenas, void *block);

/* Resizes a large block to this many pages, in place or by moving its pages.
 * Returns its address after that. Returns NULL if neither is possible, and then
 * changes nothing. */
void *arena_resize_large(struct arenas *arenas, void *block, size_t pages);

#endif
