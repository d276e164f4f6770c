/*
 * Where in its first page a large block begins.
 *
 * Blocks that all begin where a page does fight for one set of the cache next to the CPU, and loads of one
 * wait for stores to another that look the same to 4 KiB (Valat, sections 4.2, 4.4 and 5.3). So each begins
 * a whole number of cache lines further. Pure.
 */
#ifndef CALM_PLACEMENT_LINES_H
#define CALM_PLACEMENT_LINES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct line_spread {
    size_t line_bytes;
    size_t spread_bytes; /* beginnings matter modulo this; at most a page */
};

/* For an L1 whose addresses fall into the same sets after way_bytes; 0 for what is not known. */
struct line_spread line_spread_for(size_t page_bytes, size_t line_bytes, size_t way_bytes);

/*
 * Bytes from a page's start to the block that is number `turn` of its process: at most room_bytes, a multiple
 * of the line and of alignment (a power of two), and below spread_bytes. Evenly: of n blocks in a row
 * the nearest two are a third of an n-th of the room apart, and two neighbours more than a third of all; else
 * at random. Another seed turns all of it around.
 */
size_t line_offset(const struct line_spread *spread, bool evenly, uint64_t turn, uint64_t seed,
                   size_t room_bytes, size_t alignment);

#endif
