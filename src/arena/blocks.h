/* Moves blocks of one class by the magazine. A thread takes them from any depot
 * of its node and puts them into the nearest one. If the depots cannot serve
 * it, it uses the heap. Thread-safe. */
#ifndef CALM_ARENA_BLOCKS_H
#define CALM_ARENA_BLOCKS_H

#include "arena/state.h"

/* Takes up to `count` blocks of a class. Returns the number of blocks, 0 if
 * memory is short. The first byte of a block may have been written. */
size_t arena_take_blocks(struct arenas *arenas, uint32_t size_class, void **blocks, size_t count);

void arena_put_blocks(struct arenas *arenas, uint32_t size_class, void *const *blocks, size_t count);

/* Returns the number of times that a CPU cache had no block to take, or no room
 * for one. */
uint64_t arena_cache_misses(const struct arenas *arenas);

#endif
