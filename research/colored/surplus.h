/*
 * The surplus of pages from which a colored block is made: how many are made resident, how their colors are
 * determined, and which are chosen. One owner; preserves errno; allocates nothing.
 */
#ifndef CALM_COLORED_SURPLUS_H
#define CALM_COLORED_SURPLUS_H

#include "colored/block_table.h"
#include "colored/calmcolored.h"
#include "os/hardware_caches.h"

#include <stddef.h>
#include <stdint.h>

struct surplus {
    /* Set by the caller. */
    const char *root; /* stands for "/" */
    size_t page_bytes;
    struct hardware_cache cache;
    /* All but what the choice fills in: pages_examined, the pages that are resident; pages_misplaced and
     * pages_crowded; and a source of 0, which it replaces by CALM_COLORED_FRAMES or CALM_COLORED_TIMED. */
    struct calm_colored stats;

    char *base;
    size_t max_pages;
    uint64_t deadline; /* of timing */
    uint32_t *chosen;  /* the page for each position */

    /* Scratch; these and `chosen` have an element for each of max_pages. */
    uint32_t *next;
    uint64_t *frames;
    uint16_t *color_of;
};

/* Makes pages of the mapping resident, and chooses one for each position; the caller releases the mapping.
 * Returns 0, or an errno value as calm_colored_alloc. */
int surplus_choose(struct surplus *surplus, struct page_range *mapping);

#endif
