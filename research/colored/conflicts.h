/*
 * The colors of pages, found only by which pages evict which from a cache: for machines whose frame numbers
 * are hidden, or say nothing.
 *
 * Two pages have one color if they compete for the same sets. For one page, the search begins with a set of
 * pages that evict it, and removes groups from the set as long as the rest still evicts it. The remaining
 * pages have the page's color, and identify the others of that color (eviction sets; the reduction by groups
 * is from Vila, Köpf and Morales, "Theory and Practice of Finding Eviction Sets"). Pure, except for the
 * functions that the caller passes.
 */
#ifndef CALM_COLORED_CONFLICTS_H
#define CALM_COLORED_CONFLICTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct conflicts {
    /* Whether reading the walked pages evicts the page from the cache. May be wrong at times. */
    bool (*evicts)(void *cache, uint32_t page, const uint32_t *walked, size_t count);
    void *cache;
    /* Whether to give up: called before each call of evicts. NULL: never. */
    bool (*is_over)(const void *bound);
    const void *bound;
    size_t colors;
    size_t ways;
};

/* With fewer pages, some colors have too few to be found. */
static inline size_t conflicts_min_pages(size_t colors, size_t ways) {
    return 6 * ways * colors;
}

/*
 * Sets color_of[i], for each of the pages, to a number below colors, or to BALANCE_UNKNOWN. Colors are
 * numbered in the order of discovery. scratch has room for two numbers for each page. False if the cache has
 * another number of colors, or more than an eighth of the pages has none of them: the cache is hashed or
 * smaller than described, most answers are wrong, or is_over says so.
 */
bool conflicts_find(const struct conflicts *conflicts, size_t pages, uint64_t seed, uint16_t *color_of,
                    uint32_t *scratch);

/* Whether the cache confirms colors that are known otherwise: pages of each evict another of it, and as many
 * of other colors do not. False also if is_over says so. scratch has room for three times the ways. */
bool conflicts_confirm(const struct conflicts *conflicts, const uint16_t *color_of, size_t pages,
                       uint32_t *scratch);

#endif
