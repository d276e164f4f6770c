/*
 * Blocks of one class, by the magazine: from a depot of the thread's node, and into the near one; or else the
 * heap. Thread-safe in shared mode; in exclusive mode for its thread alone.
 */
#ifndef CALM_GOVERNOR_BLOCKS_H
#define CALM_GOVERNOR_BLOCKS_H

#include "governor/state.h"

/* Up to count blocks of a class; returns how many: 0 if memory is short. The thread of exclusive mode gets
 * fewer than count only if memory is short. prefaults: for it alone, pages that may not be resident are made
 * so first. Any thread may find the first byte of a block written. */
size_t governor_take_blocks(struct governor *governor, uint32_t class, void **blocks, size_t count,
                            bool prefaults);

void governor_put_blocks(struct governor *governor, uint32_t class, void *const *blocks, size_t count);

/* The number of times that a CPU's cache had no block, or no room. */
uint64_t governor_cache_misses(const struct governor *governor);

#endif
