/*
 * Placement by colors chooses the page, within a huge page, at which a large
 * block starts.
 *
 * Within a huge page, the address determines the sets of the outer caches.
 * Blocks at equal offsets in their huge pages start in the same sets. A cache
 * with w ways that c CPUs share holds w / c such blocks for each CPU (Valat,
 * sections 4.2, 4.3 and 5.2). This file therefore counts the live blocks that
 * start at each color of page. A block that would exceed a cache's capacity for
 * its color starts a few pages further on. The heap calls these functions.
 * Pure; single-owner.
 */
#ifndef CALM_PLACEMENT_COLORS_H
#define CALM_PLACEMENT_COLORS_H

#include "os/hardware_caches.h"

#include <stddef.h>
#include <stdint.h>

#define MAX_COLORS 512

struct color_cache {
    size_t colors;   /* the number of page colors; a power of two */
    size_t capacity; /* the number of blocks of one color that fit */
    uint32_t blocks[MAX_COLORS];
};

/* The colors of all caches. All zero means that no cache has colors. */
struct colors {
    size_t count;
    struct color_cache caches[MAX_HARDWARE_CACHES];
    size_t blocks;
    uint64_t seed;
};

/* Uses the caches whose ways are larger than a page. If a way is larger than a
 * huge page, the sets of a color are unknown. The color's capacity is then that
 * of all sets that it may have. */
void colors_init(struct colors *colors, const struct hardware_cache *caches, size_t count, size_t page_bytes,
                 size_t huge_bytes, uint64_t seed);

#define COLORS_NO_ROOM SIZE_MAX

/* Returns the lowest number of pages to skip, at most `spare`, before a block
 * that could start at page number `page`, so that no cache exceeds its capacity
 * for the color. Returns COLORS_NO_ROOM if there is no such number. The seed
 * chooses the page of the first block, so that processes differ. */
size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare);

/* Returns the number of pages to skip at the start of a huge page, up to
 * colors_spare. The seed has no influence on it. */
size_t colors_skip_in_huge_page(const struct colors *colors);

/* Returns the number of spare pages by which a block can reach every color. */
size_t colors_spare(const struct colors *colors);

/* Count a block that starts at the page, and stop counting one. */
void colors_add(struct colors *colors, uint64_t page);
void colors_remove(struct colors *colors, uint64_t page);

#endif
