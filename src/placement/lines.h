/*
 * Placement by lines chooses the cache line, within its first page, at which a
 * large block starts.
 *
 * Blocks that all start at the start of a page compete for one set of the L1
 * cache. In addition, loads of one block wait for stores to another block whose
 * address is equal modulo 4 KiB (Valat, sections 4.2, 4.4 and 5.3). Each block
 * therefore starts at an offset of a whole number of cache lines. The placement
 * code of both allocators calls this file. Pure.
 */
#ifndef CALM_PLACEMENT_LINES_H
#define CALM_PLACEMENT_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The spread of offsets, in bytes. */
struct line_spread {
    size_t line_bytes;
    size_t spread_bytes; /* offsets matter modulo this number, at most a page */
};

/* Returns the spread for an L1 cache whose addresses fall into the same sets
 * after way_bytes. 0 means unknown. */
struct line_spread line_spread_for(size_t page_bytes, size_t line_bytes, size_t way_bytes);

/*
 * Returns the offset, in bytes, of the block with number `turn` in its process.
 * The offset is at most room_bytes, below spread_bytes, and a multiple of the
 * line and of `alignment` (a power of two).
 *
 * If `evenly` is true, the nearest two of n successive blocks are at least a
 * third of an n-th of the room apart, and two successive blocks are more than a
 * third of the room apart. Otherwise offsets are random. The seed rotates all
 * offsets.
 */
size_t line_offset(const struct line_spread *spread, bool evenly, uint64_t turn, uint64_t seed,
                   size_t room_bytes, size_t alignment);

#endif
