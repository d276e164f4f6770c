/*
 * The page of huge-page memory at which a large block starts.
 *
 * Within a huge page, an address determines the sets of the outer caches: blocks at the same offset in their
 * huge pages start in the same sets. A cache with w ways, shared by c CPUs, holds w / c of these for each CPU
 * (Valat, sections 4.2, 4.3 and 5.2). So the live blocks that start at each color of page are counted, and a
 * block that would exceed the cache's capacity for its color starts a few pages further on. Called by the
 * heap. Pure; single-owner.
 */
#ifndef CALM_PLACEMENT_COLORS_H
#define CALM_PLACEMENT_COLORS_H

#include "os/hardware_caches.h"

#include <stddef.h>
#include <stdint.h>

#define MAX_COLORS 512

struct color_cache {
    size_t colors;   /* of pages; a power of two */
    size_t capacity; /* in blocks of one color */
    uint32_t blocks[MAX_COLORS];
};

/* All zero: no cache has colors. */
struct colors {
    size_t count;
    struct color_cache caches[MAX_HARDWARE_CACHES];
    size_t blocks;
    uint64_t seed;
};

/* Uses the caches whose ways are larger than a page. If a way is larger than a huge page, the sets of a color
 * are unknown, and the color's capacity is that of all of them. */
void colors_init(struct colors *colors, const struct hardware_cache *caches, size_t count, size_t page_bytes,
                 size_t huge_bytes, uint64_t seed);

#define COLORS_NO_ROOM SIZE_MAX

/*
 * The lowest number of pages, at most spare, to skip before a block that could start at page number `page`,
 * so that no cache exceeds its capacity for the color; COLORS_NO_ROOM if each would exceed it. The first
 * block starts at a page chosen by the seed, so that processes differ.
 */
size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare);

/* The same at the start of a huge page, with as many pages to skip as could be needed, ignoring the seed. */
size_t colors_skip_in_huge_page(const struct colors *colors);

/* The number of spare pages with which every color can be reached. */
size_t colors_spare(const struct colors *colors);

/* A block starts at the page; one that started there is gone. */
void colors_add(struct colors *colors, uint64_t page);
void colors_remove(struct colors *colors, uint64_t page);

#endif
