#include "colored/colored.h"

#include "base/size.h"
#include "colored/balance.h"
#include "colored/block_table.h"
#include "colored/page_mover.h"
#include "colored/pagemap.h"
#include "colored/surplus.h"
#include "os/hardware_caches.h"
#include "os/vm.h"

#include <errno.h>

#define MAX_LEVEL 255 /* of a cache; the bits above are flags */

/* For a larger block, a surplus that suffices is unlikely. */
#define MAX_PAGES ((size_t)1 << 24)

/* ---- making a block ---- */

/* Returns 0, or ENOTSUP if there is no such cache, or it has no colors. */
static int find_cache(struct surplus *surplus) {
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read(surplus->root, caches, MAX_HARDWARE_CACHES);
    for (size_t i = 0; i < count; i++) {
        size_t colors = hardware_cache_way_bytes(&caches[i]) / surplus->page_bytes;
        if (caches[i].level == surplus->stats.level && (caches[i].sets & (caches[i].sets - 1)) == 0 &&
            colors > 1 && colors <= BALANCE_MAX_COLORS) {
            surplus->cache = caches[i];
            surplus->stats.colors = (uint32_t)colors;
            return 0;
        }
    }
    return ENOTSUP;
}

/* Successive blocks begin at colors far apart: the step is odd, so with a power of two of colors, all have
 * their turn. */
static uint32_t next_first_color(size_t colors) {
    static _Atomic(size_t) blocks;
    size_t turn = atomic_fetch_add_explicit(&blocks, 1, memory_order_relaxed);
    return (uint32_t)(turn * ((colors / 2 + colors / 8) | 1) % colors);
}

/* Moves the chosen pages, in order, to the block's own mapping. */
static int move_chosen(const struct surplus *surplus, struct block *block) {
    size_t bytes = surplus->stats.pages * surplus->page_bytes;
    char *pages = mapping_reserve(&block->pages, bytes);
    if (pages == NULL || !vm_commit(pages, bytes)) {
        return ENOMEM;
    }
    struct page_mover mover;
    int error = 0;
    page_mover_open(&mover, pages, bytes);
    for (size_t i = 0; i < surplus->stats.pages && error == 0; i++) {
        error = page_mover_move(&mover, surplus->base + surplus->chosen[i] * surplus->page_bytes,
                                pages + i * surplus->page_bytes);
    }
    page_mover_close(&mover);
    block->moved_pages = mover.mappings;
    return error;
}

int colored_alloc(const char *root, size_t bytes, unsigned cache, void **address) {
    const unsigned sources = CALM_COLORED_FRAMES | CALM_COLORED_TIMED;
    struct surplus surplus = {.root = root, .page_bytes = vm_page_size()};
    struct calm_colored *stats = &surplus.stats;
    stats->version = CALM_COLORED_VERSION;
    stats->level = cache & ~sources;
    stats->source = cache & sources;
    stats->pages = bytes / surplus.page_bytes + (bytes % surplus.page_bytes != 0);
    if (bytes == 0 || stats->level == 0 || stats->level > MAX_LEVEL || stats->source == sources) {
        return EINVAL;
    }
    if (stats->pages > MAX_PAGES) {
        return ENOMEM;
    }
    int error = find_cache(&surplus);
    if (error != 0) {
        return error;
    }
    struct block *block = block_claim_vacant();
    if (block == NULL) {
        return ENOMEM;
    }
    stats->first_color = next_first_color(stats->colors);
    error = surplus_choose(&surplus, &block->surplus);
    error = error != 0 ? error : move_chosen(&surplus, block);
    if (error != 0) {
        block_discard(block);
        return error;
    }
    block->stats = *stats;
    *address = block_publish(block);
    return 0;
}

/* ---- blocks that exist ---- */

bool colored_free(void *address) {
    struct block *block = block_claim(address);
    if (block != NULL) {
        block_discard(block);
    }
    return block != NULL;
}

/* Counts anew the pages that have another color than their position. Where frames are hidden, the number of
 * the start stays. */
static void count_misplaced(const char *address, struct calm_colored *stats) {
    enum { FRAMES = 512 };
    uint64_t frames[FRAMES];
    size_t misplaced = 0;
    for (size_t page = 0; page < stats->pages; page += FRAMES) {
        size_t count = size_min(stats->pages - page, FRAMES);
        if (pagemap_frames("", address + page * vm_page_size(), count, frames) != 0) {
            return;
        }
        for (size_t i = 0; i < count; i++) {
            misplaced += frames[i] == PAGEMAP_ABSENT ||
                         frames[i] % stats->colors != (stats->first_color + page + i) % stats->colors;
        }
    }
    stats->pages_misplaced = misplaced;
}

bool colored_stats(const void *address, struct calm_colored *stats) {
    bool exists = block_stats(address, stats);
    if (exists && stats->source == CALM_COLORED_FRAMES) {
        count_misplaced(address, stats);
    }
    return exists;
}

void colored_after_fork(void) {
    block_table_after_fork();
}
