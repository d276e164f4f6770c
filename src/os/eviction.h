/*
 * Whether loads of some pages drive another's line out of a cache, found out by the time that a load takes.
 *
 * What a hypervisor hides it cannot hide from this: pages that fight for the same sets do so wherever their
 * frames are said to lie. Needs a clock that counts cycles (x86-64). Other work on the CPU disturbs a load,
 * so each answer is that of most of several. Single-owner; allocates nothing; only reads the pages.
 */
#ifndef CALM_OS_EVICTION_H
#define CALM_OS_EVICTION_H

#include "os/caches.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct eviction {
    const char *base; /* of resident pages, named by their numbers from here */
    size_t page_bytes;
    size_t line_bytes;
    uint64_t missed; /* a load that takes as long was not answered by the cache */
};

/* Whether there is a clock that is fine enough. */
bool eviction_can_time(void);

/* For a cache of colors colors of pages: pages must be at least four times what it holds. False if no cache
 * of that size is seen. */
bool eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t page_bytes,
                   const struct os_cache *cache, size_t colors);

/* Whether the page's line is gone from the cache after lines of the walked pages, it not among them, were
 * read. The first argument is a struct eviction. */
bool eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);

#endif
