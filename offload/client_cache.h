/*
 * The client cache: a stack for each class and endpoint, of blocks that clients
 * freed and may soon want again.
 *
 * It is between a CPU's cache and the server: a program that in turn frees and
 * allocates more than the CPU's cache holds gets its blocks back without the
 * transfer of a cache line between CPUs. At the end of an epoch the server
 * takes the blocks that stayed unused, the oldest first.
 *
 * All functions but the level are for the thread that has entered the endpoint.
 */
#ifndef CALM_OFFLOAD_CLIENT_CACHE_H
#define CALM_OFFLOAD_CLIENT_CACHE_H

#include "offload/endpoint.h"

#include <string.h>

/* What each class may have in an endpoint; in addition at most 1,024 blocks. */
#define CLIENT_CACHE_CLASS_BYTES ((size_t)64 << 10)

/* Adds the caches to the layout, class_bytes for each class. */
void client_cache_lay_out(struct endpoint_layout *layout, size_t class_bytes);

/* Exact for the thread that has entered. */
static inline uint32_t client_cache_level(const struct endpoint *endpoint, uint32_t size_class) {
    return atomic_load_explicit(&endpoint->caches[size_class].count, memory_order_relaxed);
}

static inline void **client_cache_stack(struct endpoint *endpoint, uint32_t size_class) {
    return (void **)(void *)(endpoint->words + endpoint->layout->cache_start[size_class]);
}

static inline void client_cache_set(struct endpoint *endpoint, uint32_t size_class, uint32_t count) {
    atomic_store_explicit(&endpoint->caches[size_class].count, count, memory_order_release);
}

/* Pops up to count blocks, those freed last; returns how many. */
static inline size_t client_cache_pop(struct endpoint *endpoint, uint32_t size_class, void **blocks,
                                      size_t count) {
    uint32_t level = client_cache_level(endpoint, size_class);
    uint32_t got = level < count ? level : (uint32_t)count;
    if (got > 0) {
        struct client_cache *cache = &endpoint->caches[size_class];
        level -= got;
        memcpy(blocks, client_cache_stack(endpoint, size_class) + level, got * sizeof *blocks);
        client_cache_set(endpoint, size_class, level);
        cache->min_count = level < cache->min_count ? level : cache->min_count;
    }
    return got;
}

/* Pushes all of the blocks, or none if there is no room for all. */
static inline bool client_cache_push(struct endpoint *endpoint, uint32_t size_class, void *const *blocks,
                                     size_t count) {
    uint32_t level = client_cache_level(endpoint, size_class);
    if (level + count > endpoint->layout->max_cached[size_class]) {
        return false;
    }
    memcpy(client_cache_stack(endpoint, size_class) + level, blocks, count * sizeof *blocks);
    client_cache_set(endpoint, size_class, level + (uint32_t)count);
    return true;
}

/* Takes the oldest of the blocks that were unused in this epoch, at most a
 * magazine; returns how many. If there are none, a new epoch begins: all blocks
 * count as unused until they are popped. */
size_t client_cache_take_unused(struct endpoint *endpoint, uint32_t size_class, void **blocks);

#endif
