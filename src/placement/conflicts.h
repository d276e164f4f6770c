/*
 * The colors of pages from nothing but which of them drive which out of a cache: for machines where physical
 * addresses cannot be seen, or say nothing.
 *
 * Two pages have one color if they fight for the same sets. So some page is taken, and of the others, which
 * all together drive it out, groups are left out as long as the rest still does; what is left at last is of
 * its color, and finds the others that are (eviction sets; the reduction by groups is that of Vila, Köpf and
 * Morales, "Theory and Practice of Finding Eviction Sets"). Pure but for the question it asks.
 */
#ifndef CALM_PLACEMENT_CONFLICTS_H
#define CALM_PLACEMENT_CONFLICTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct conflicts {
    /* Whether the cache has lost a page after the walked ones were read. May be wrong at times. */
    bool (*evicts)(void *cache, uint32_t page, const uint32_t *walked, size_t count);
    void *cache;
    /* Whether no more is to be asked: asked before each question of the other kind. NULL: never. */
    bool (*is_over)(const void *bound);
    const void *bound;
    size_t colors;
    size_t ways;
};

/* Pages that it takes: of fewer, some colors have too few to be found by. */
static inline size_t conflicts_pages_least(size_t colors, size_t ways) {
    return 6 * ways * colors;
}

/*
 * color_of[i], for each of the pages, is a number below colors, or BALANCE_UNKNOWN. The numbers are in no
 * order. scratch has room for two numbers for each page. False if there are not exactly so many colors, or
 * more than an eighth of the pages fits none: a cache that is hashed or smaller than it says, answers that
 * are mostly wrong, or no more was to be asked.
 */
bool conflicts_find(const struct conflicts *conflicts, size_t pages, uint64_t seed, uint16_t *color_of,
                    uint32_t *scratch);

/* Whether known colors are those of the cache: of each, pages drive another of it out, and as many of other
 * colors do not; false, too, if no more was to be asked. scratch has room for three times the ways. */
bool conflicts_confirm(const struct conflicts *conflicts, const uint16_t *color_of, size_t pages,
                       uint32_t *scratch);

#endif
