#include "placement/colors.h"

#include "base/assert.h"
#include "base/size.h"

#include <stdbool.h>

void colors_init(struct colors *colors, const struct hardware_cache *caches, size_t count, size_t page_bytes,
                 size_t huge_bytes, uint64_t seed) {
    *colors = (struct colors){.seed = seed};
    for (size_t i = 0; i < count && colors->count < MAX_HARDWARE_CACHES; i++) {
        size_t way = hardware_cache_way_bytes(&caches[i]);
        size_t max = size_min(size_min(way, huge_bytes) / page_bytes, MAX_COLORS);
        size_t here = 1;
        while (here * 2 <= max) {
            here *= 2;
        }
        if (here < 2) {
            continue;
        }
        calm_assert(here <= MAX_COLORS && (here & (here - 1)) == 0, here);
        size_t places = caches[i].ways * (way / (here * page_bytes));
        colors->caches[colors->count++] =
            (struct color_cache){.colors = here, .capacity = size_max(places / caches[i].cpus, 1)};
    }
}

static bool has_room(const struct colors *colors, uint64_t page) {
    for (size_t i = 0; i < colors->count; i++) {
        const struct color_cache *cache = &colors->caches[i];
        if (cache->blocks[page & (cache->colors - 1)] >= cache->capacity) {
            return false;
        }
    }
    return true;
}

size_t colors_spare(const struct colors *colors) {
    size_t max = 1;
    for (size_t i = 0; i < colors->count; i++) {
        max = size_max(max, colors->caches[i].colors);
    }
    return max - 1;
}

static size_t first_with_room(const struct colors *colors, uint64_t page, size_t spare) {
    spare = size_min(spare, colors_spare(colors));
    for (size_t skip = 0; skip <= spare; skip++) {
        if (has_room(colors, page + skip)) {
            return skip;
        }
    }
    return COLORS_NO_ROOM;
}

size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare) {
    if (colors->blocks == 0) {
        return (size_t)(colors->seed % (size_min(spare, colors_spare(colors)) + 1));
    }
    return first_with_room(colors, page, spare);
}

size_t colors_skip_in_huge_page(const struct colors *colors) {
    /* If all colors of a cache are full, no search is needed. */
    for (size_t i = 0; i < colors->count; i++) {
        if (colors->blocks >= colors->caches[i].colors * colors->caches[i].capacity) {
            return COLORS_NO_ROOM;
        }
    }
    return first_with_room(colors, 0, SIZE_MAX);
}

static void count_block(struct colors *colors, uint64_t page, int change) {
    calm_assert(change > 0 || colors->blocks > 0, page, colors->blocks);
    colors->blocks += (size_t)change;
    for (size_t i = 0; i < colors->count; i++) {
        calm_assert(change > 0 || colors->caches[i].blocks[page & (colors->caches[i].colors - 1)] > 0, page,
                    i);
        colors->caches[i].blocks[page & (colors->caches[i].colors - 1)] += (uint32_t)change;
    }
}

void colors_add(struct colors *colors, uint64_t page) {
    count_block(colors, page, 1);
}

void colors_remove(struct colors *colors, uint64_t page) {
    count_block(colors, page, -1);
}
