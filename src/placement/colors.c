#include "placement/colors.h"

#include <stdbool.h>

static size_t lesser(size_t a, size_t b) {
    return a < b ? a : b;
}

void colors_init(struct colors *colors, const struct os_cache *caches, size_t count, size_t page_bytes,
                 size_t huge_bytes, uint64_t seed) {
    *colors = (struct colors){.seed = seed};
    for (size_t i = 0; i < count && colors->count < CACHES_MOST; i++) {
        size_t way = os_cache_way_bytes(&caches[i]);
        size_t most = lesser(lesser(way, huge_bytes) / page_bytes, COLORS_MOST);
        size_t here = 1;
        while (here * 2 <= most) {
            here *= 2;
        }
        if (here < 2) {
            continue;
        }
        size_t places = caches[i].ways * (way / (here * page_bytes));
        size_t capacity = places / caches[i].cpus;
        colors->caches[colors->count++] =
            (struct color_cache){.colors = here, .capacity = capacity == 0 ? 1 : capacity};
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
    size_t most = 1;
    for (size_t i = 0; i < colors->count; i++) {
        most = colors->caches[i].colors > most ? colors->caches[i].colors : most;
    }
    return most - 1;
}

static size_t first_with_room(const struct colors *colors, uint64_t page, size_t spare) {
    spare = lesser(spare, colors_spare(colors));
    for (size_t skip = 0; skip <= spare; skip++) {
        if (has_room(colors, page + skip)) {
            return skip;
        }
    }
    return COLORS_NO_ROOM;
}

size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare) {
    if (colors->blocks == 0) {
        return (size_t)(colors->seed % (lesser(spare, colors_spare(colors)) + 1));
    }
    return first_with_room(colors, page, spare);
}

size_t colors_skip_in_huge_page(const struct colors *colors) {
    /* Not to be looked for among many that are full. */
    for (size_t i = 0; i < colors->count; i++) {
        if (colors->blocks >= colors->caches[i].colors * colors->caches[i].capacity) {
            return COLORS_NO_ROOM;
        }
    }
    return first_with_room(colors, 0, SIZE_MAX);
}

void colors_add(struct colors *colors, uint64_t page) {
    colors->blocks++;
    for (size_t i = 0; i < colors->count; i++) {
        colors->caches[i].blocks[page & (colors->caches[i].colors - 1)]++;
    }
}

void colors_remove(struct colors *colors, uint64_t page) {
    colors->blocks--;
    for (size_t i = 0; i < colors->count; i++) {
        colors->caches[i].blocks[page & (colors->caches[i].colors - 1)]--;
    }
}
