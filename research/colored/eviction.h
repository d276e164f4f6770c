/*
 * Whether reading some pages evicts a line of another from a cache, measured by the time of a load.
 *
 * This works where frame numbers say nothing, as in a virtual machine: pages that share sets of the cache
 * evict each other whatever their frames are said to be. It needs a clock that counts cycles (x86-64). Other
 * work on the CPU disturbs single loads, so each answer is the majority of several. An instance has one
 * owner; nothing is allocated, and pages are only read.
 */
#ifndef CALM_COLORED_EVICTION_H
#define CALM_COLORED_EVICTION_H

#include "os/hardware_caches.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct eviction {
    const char *base; /* of the pages, which are resident and numbered from here */
    size_t page_bytes;
    size_t line_bytes;
    uint64_t miss_cycles; /* a load that takes this long missed the cache */
};

/* Whether the processor has such a clock. */
bool eviction_can_time(void);

/* For a cache of a number of page colors, with at least four times as many pages as it holds. False if loads
 * do not show a cache of that size. */
bool eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t page_bytes,
                   const struct hardware_cache *cache, size_t colors);

/* Whether reading the walked pages evicts the page's line; the page is not one of them. The first argument is
 * a struct eviction. */
bool eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);

#endif
