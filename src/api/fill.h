/*
 * With assertions, new and freed blocks of size classes are filled with a
 * pattern. This exposes programs that read memory before they write it, or
 * after they free it. Large blocks are not filled, because a program may never
 * touch most of their pages. Without assertions these functions do nothing.
 */
#ifndef CALM_API_FILL_H
#define CALM_API_FILL_H

#include "api/instance.h"
#include "arena/select.h"

#define FILL_NEW   0xa5
#define FILL_FREED 0x5a

#ifdef CALM_ASSERTIONS

#include <string.h>

static inline void fill_new(void *block, uint32_t size_class) {
    memset(block, FILL_NEW, calm_all_classes.of[size_class].size);
}

/* Fills a freed block. Does nothing if the pointer is no block, or if the block
 * was freed before, because its pages may be purged already. Checks this
 * without a lock, as far as that is possible; ThreadSanitizer ignores these
 * reads. */
static inline __attribute__((no_sanitize("thread"))) void fill_freed(void *block, uint32_t size_class) {
    const struct space *space = &heap_of(&calm_arenas, block)->space;
    uint32_t page = size_class == 0 ? 0 : space_page(space, block);
    if (page == 0 || (space->users_of[page] & PAGE_USERS) == 0) {
        return;
    }
    size_t size = calm_all_classes.of[size_class].size;
    if ((size_t)((char *)block - space_span_of(space, page)->base) % size == 0) {
        memset(block, FILL_FREED, size);
    }
}

#else

static inline void fill_new(void *block, uint32_t size_class) {
    (void)block, (void)size_class;
}

static inline void fill_freed(void *block, uint32_t size_class) {
    (void)block, (void)size_class;
}

#endif

/* Fills a new block if one was found. Returns `found`. */
static inline __attribute__((always_inline)) bool fill_if(bool found, void *const *block,
                                                          uint32_t size_class) {
    if (found) {
        fill_new(*block, size_class);
    }
    return found;
}

#endif
