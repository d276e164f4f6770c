/*
 * Which pages of a surplus to keep, and in what order, so that they fill a cache evenly: page coloring done
 * afterwards (Valat, section 2.4; Kessler and Hill). Pure.
 *
 * The order is the regular one: place i is for color (first + i) modulo colors, so that every stretch of
 * pages, and not only the whole, is spread as evenly as it can be.
 */
#ifndef CALM_PLACEMENT_BALANCE_H
#define CALM_PLACEMENT_BALANCE_H

#include <stddef.h>
#include <stdint.h>

#define BALANCE_COLORS_MOST 1024
#define BALANCE_UNKNOWN     UINT16_MAX

struct balance {
    size_t misplaced; /* places whose page has not the color they are for */
    size_t crowded;   /* pages beyond what an even spread has of their color, rounded up */
};

/*
 * chosen[i], for each of the places, is the page that goes there, each at most once. Of all choices it is one
 * with the fewest misplaced pages; of those, one with the fewest pages of unknown color; of those, one in
 * which the colors' numbers of pages are the most even (the least sum of their squares).
 *
 * There are at least as many pages as places, and at most BALANCE_COLORS_MOST colors. next is scratch, one
 * for each page.
 */
struct balance balance_choose(const uint16_t *color_of, size_t pages, size_t colors, size_t first,
                              size_t places, uint32_t *chosen, uint32_t *next);

#endif
