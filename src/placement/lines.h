/*
 * The cache line of its first page at which a large block starts.
 *
 * Blocks that all start at the start of a page contend for one set of the L1 cache, and loads of one wait for
 * stores to another whose address is the same modulo 4 KiB (Valat, sections 4.2, 4.4 and 5.3). So each starts
 * at an offset, a whole number of cache lines. Called by both allocators' placement. Pure.
 */
#ifndef CALM_PLACEMENT_LINES_H
#define CALM_PLACEMENT_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In bytes. */
struct line_spread {
    size_t line_bytes;
    size_t spread_bytes; /* offsets matter modulo this; at most a page */
};

/* For an L1 cache whose addresses fall into the same sets after way_bytes; 0 for what is unknown. */
struct line_spread line_spread_for(size_t page_bytes, size_t line_bytes, size_t way_bytes);

/*
 * The offset, in bytes, of the block that is number `turn` of its process: at most room_bytes, a multiple of
 * the line and of alignment (a power of two), and below spread_bytes. Evenly: of n successive blocks the
 * nearest two are a third of an n-th of the room apart, and two neighbours more than a third of all; else
 * random. The seed rotates all offsets.
 */
size_t line_offset(const struct line_spread *spread, bool evenly, uint64_t turn, uint64_t seed,
                   size_t room_bytes, size_t alignment);

#endif
