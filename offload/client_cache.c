#include "offload/client_cache.h"

#include "base/assert.h"
#include "base/size.h"

#define MAX_CLIENT_BLOCKS 1024

void client_cache_lay_out(struct endpoint_layout *layout, size_t class_bytes) {
    for (uint32_t size_class = 1; size_class < layout->classes->count; ++size_class) {
        size_t blocks = class_bytes / layout->classes->of[size_class].size;
        layout->cache_start[size_class] = layout->words;
        layout->max_cached[size_class] = (uint16_t)size_min(blocks, MAX_CLIENT_BLOCKS);
        layout->words += layout->max_cached[size_class];
    }
}

size_t client_cache_take_unused(struct endpoint *endpoint, uint32_t size_class, void **blocks) {
    struct client_cache *cache = &endpoint->caches[size_class];
    void **stack = client_cache_stack(endpoint, size_class);
    uint32_t got = (uint32_t)size_min(cache->min_count, MAX_MAGAZINE_BLOCKS);
    calm_assert(cache->min_count <= client_cache_level(endpoint, size_class), size_class, cache->min_count);
    if (got == 0) {
        cache->min_count = client_cache_level(endpoint, size_class);
        return 0;
    }
    uint32_t left = client_cache_level(endpoint, size_class) - got;
    memcpy(blocks, stack, got * sizeof *blocks);
    memmove(stack, stack + got, left * sizeof *stack);
    client_cache_set(endpoint, size_class, left);
    cache->min_count -= got;
    return got;
}
