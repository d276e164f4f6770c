/*
 * With assertions, new and freed blocks of size classes are filled, so that a program that reads what it did
 * not write, or uses what it freed, is seen to. Large blocks are left as they are: much of them may never be
 * touched. Without assertions these functions do nothing.
 */
#ifndef CALM_API_FILL_H
#define CALM_API_FILL_H

#include "api/state.h"

#define FILL_NEW   0xa5
#define FILL_FREED 0x5a

#ifdef CALM_ASSERTIONS

#include <string.h>

static inline void fill_new(void *block, uint32_t class) {
    memset(block, FILL_NEW, calm_allocator.classes.of[class].size);
}

/* Unless it is no block, or one that was freed before and whose pages may be purged, as far as is known
 * without a lock, of which ThreadSanitizer knows nothing. */
static inline __attribute__((no_sanitize("thread"))) void fill_freed(void *block, uint32_t class) {
    const struct space *space = &calm_governor.heap.space;
    uint32_t page = class == 0 ? 0 : space_page(space, block);
    if (page == 0 || (space->users_of[page] & PAGE_USERS) == 0) {
        return;
    }
    size_t size = calm_allocator.classes.of[class].size;
    if ((size_t)((char *)block - space_span_of(space, page)->base) % size == 0) {
        memset(block, FILL_FREED, size);
    }
}

#else

static inline void fill_new(void *block, uint32_t class) {
    (void)block, (void)class;
}

static inline void fill_freed(void *block, uint32_t class) {
    (void)block, (void)class;
}

#endif

/* Fills a new block if there is one; returns whether there is. */
static inline __attribute__((always_inline)) bool fill_if(bool found, void *const *block, uint32_t class) {
    if (found) {
        fill_new(*block, class);
    }
    return found;
}

#endif
