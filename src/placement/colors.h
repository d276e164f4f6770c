/*
 * Which page of huge memory a large block begins at.
 *
 * In a huge page, addresses and places in the outer caches go together: blocks that begin as far from their
 * huge pages' starts begin in the same sets, and a cache of so many ways, shared by so many CPUs, holds that
 * many of each (Valat, sections 4.2, 4.3 and 5.2). So the living blocks that begin at each color of page are
 * counted, and one that would be too many begins a few pages further on. Pure; single-owner.
 */
#ifndef CALM_PLACEMENT_COLORS_H
#define CALM_PLACEMENT_COLORS_H

#include "os/caches.h"

#include <stddef.h>
#include <stdint.h>

#define COLORS_MOST 512

struct color_cache {
    size_t colors;   /* of pages; a power of two */
    size_t capacity; /* blocks of one color that it has room for */
    uint32_t blocks[COLORS_MOST];
};

/* All zero: no cache has colors. */
struct colors {
    size_t count;
    struct color_cache caches[CACHES_MOST];
    size_t blocks;
    uint64_t seed;
};

/* Of the caches that a page does not cover. What of a way lies beyond a huge page is anybody's: there a
 * color has as many more places. */
void colors_init(struct colors *colors, const struct os_cache *caches, size_t count, size_t page_bytes,
                 size_t huge_bytes, uint64_t seed);

#define COLORS_NO_ROOM SIZE_MAX

/*
 * The fewest pages, of at most spare, to leave out before a block that could begin at a page whose address is
 * `page` pages, so that no cache has too many of its color; COLORS_NO_ROOM if each would be too many. The
 * first block begins as the seed says, so that processes differ.
 */
size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare);

/* The same where a huge page begins, and with as many pages to leave out as could be needed; without regard
 * to the seed. */
size_t colors_skip_in_huge_page(const struct colors *colors);

/* With so many pages to spare, every color can be had. */
size_t colors_spare(const struct colors *colors);

/* A block begins at the page; one that began there is gone. */
void colors_add(struct colors *colors, uint64_t page);
void colors_remove(struct colors *colors, uint64_t page);

#endif
