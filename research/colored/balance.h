/*
 * The selection of pages from a surplus, and their order, so that they fill a cache evenly: page coloring
 * after the allocation (Valat, section 2.4; Kessler and Hill). Pure.
 *
 * Position i is for color (first + i) modulo the number of colors, so that every stretch of the selected
 * pages, and not only the whole, is spread as evenly as it can be.
 */
#ifndef CALM_COLORED_BALANCE_H
#define CALM_COLORED_BALANCE_H

#include <stddef.h>
#include <stdint.h>

#define BALANCE_MAX_COLORS 1024
#define BALANCE_UNKNOWN    UINT16_MAX

struct balance {
    size_t misplaced; /* positions whose page has another color than theirs */
    size_t crowded;   /* pages above an even share of their color, rounded up */
};

/*
 * Sets chosen[i] to the page for position i; no page is chosen twice. No other choice has fewer misplaced
 * pages; of those with as few, none has fewer pages of unknown color; and of those, none spreads the pages
 * more evenly over the colors (by the sum of the squares of their numbers).
 *
 * There are at least as many pages as positions, and at most BALANCE_MAX_COLORS colors. next is scratch, one
 * for each page.
 */
struct balance balance_choose(const uint16_t *color_of, size_t pages, size_t colors, size_t first,
                              size_t positions, uint32_t *chosen, uint32_t *next);

#endif
