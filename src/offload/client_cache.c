#include "offload/client_cache.h"

#include "base/assert.h"
#include "base/size.h"

#define MAX_CLIENT_BLOCKS 1024

void client_cache_lay_out(struct endpoint_layout *layout, size_t class_bytes) {
    for (uint32_t class = 1; class < layout->classes->count; ++class) {
        size_t blocks = class_bytes / layout->classes->of[class].size;
        layout->cache_start[class] = layout->words;
        layout->max_cached[class] = (uint16_t)size_min(blocks, MAX_CLIENT_BLOCKS);
        layout->words += layout->max_cached[class];
    }
}

size_t client_cache_take_unused(struct endpoint *endpoint, uint32_t class, void **blocks) {
    struct client_cache *cache = &endpoint->caches[class];
    void **stack = client_cache_stack(endpoint, class);
    uint32_t got = (uint32_t)size_min(cache->min_count, MAX_MAGAZINE_BLOCKS);
    calm_assert(cache->min_count <= client_cache_level(endpoint, class), class, cache->min_count);
    if (got == 0) {
        cache->min_count = client_cache_level(endpoint, class);
        return 0;
    }
    uint32_t left = client_cache_level(endpoint, class) - got;
    memcpy(blocks, stack, got * sizeof *blocks);
    memmove(stack, stack + got, left * sizeof *stack);
    client_cache_set(endpoint, class, left);
    cache->min_count -= got;
    return got;
}
