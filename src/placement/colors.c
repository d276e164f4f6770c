#include "placement/colors.h"

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

/* Blocks beyond what the caches have room for, if one more began there. */
static size_t excess(const struct colors *colors, uint64_t page) {
    size_t sum = 0;
    for (size_t i = 0; i < colors->count; i++) {
        const struct color_cache *cache = &colors->caches[i];
        size_t blocks = cache->blocks[page & (cache->colors - 1)] + 1;
        sum += blocks > cache->capacity ? blocks - cache->capacity : 0;
    }
    return sum;
}

static size_t most_colors(const struct colors *colors) {
    size_t most = 1;
    for (size_t i = 0; i < colors->count; i++) {
        most = colors->caches[i].colors > most ? colors->caches[i].colors : most;
    }
    return most;
}

/* The fewest pages to leave out, of at most spare, for the least excess, which is put in *least. */
static size_t best_skip(const struct colors *colors, uint64_t page, size_t spare, size_t *least) {
    spare = lesser(spare, most_colors(colors) - 1);
    size_t best = 0;
    *least = SIZE_MAX;
    for (size_t skip = 0; skip <= spare && *least > 0; skip++) {
        size_t here = excess(colors, page + skip);
        if (here < *least) {
            *least = here;
            best = skip;
        }
    }
    return best;
}

size_t colors_skip(const struct colors *colors, uint64_t page, size_t spare) {
    if (colors->blocks == 0) {
        return (size_t)(colors->seed % (lesser(spare, most_colors(colors) - 1) + 1));
    }
    size_t least;
    return best_skip(colors, page, spare, &least);
}

bool colors_have_room(const struct colors *colors, uint64_t page, size_t spare) {
    size_t least;
    best_skip(colors, page, spare, &least);
    return least == 0;
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
