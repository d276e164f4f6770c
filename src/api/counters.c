#include "api/counters.h"

#include "api/features.h"
#include "api/instance.h"
#include "arena/arena.h"
#include "arena/blocks.h"
#include "arena/flush.h"
#include "arena/limit.h"
#include "os/counter_table.h"

#include <string.h>

/* The note is in this file because the linker of a static program always takes
 * this file, and the note makes it take counter_terms.c, too. */
COUNTER_TABLE_NOTE(calm_counter_table);

static void fill_totals(struct calm_stats *stats) {
    const struct arena *arena = &calm_arena;
    uint64_t page = page_bytes(arena);
#define ARENA(name, word)       stats->name = arena->word;
#define ARENA_PAGES(name, word) stats->name = arena->word * page;
#define CACHES(name, word)      stats->name = calm_caches.word;
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
    stats->cache_misses = arena_cache_misses(arena);
}

/* Subtracts what the parent of a forked child had counted. */
static void subtract_parents(struct calm_stats *stats) {
#define GAUGE(name)
#define TOTAL(name)                           stats->name -= calm_arena.totals_at_fork.name;
#define COUNTER(name, unit, kind, place, ...) kind(name)
#include "api/counters.def"
}

void counters_fill(struct calm_stats *stats) {
    memset(stats, 0, sizeof *stats);
    stats->version = CALM_STATS_VERSION;
    stats->size = sizeof *stats;
    if (!allocator_is_ready()) {
        return;
    }
    struct arena *arena = &calm_arena;
    const struct heap *heap = &arena->heap;
    uint64_t page = page_bytes(arena);
    lock_acquire(&arena->lock); /* heap_locks does not count this one */
    stats->in_use = heap_used_pages(heap) * page;
    stats->dirty = (heap_dirty_pages(heap) + heap->purging_pages) * page;
    stats->footprint = stats->in_use + stats->dirty;
    stats->reserved = space_reserved_bytes(&heap->space);
    stats->metadata = space_metadata_bytes(&heap->space);
    stats->dirty_limit = limit_now(arena).max * page;
    fill_totals(stats);
    lock_release(&arena->lock);
    stats->metadata += heap_profile_bytes();
    arena_cached(arena, &stats->cached);
    stats->cached_limit = arena_max_cached(arena);
    subtract_parents(stats);
}

void counters_start_child(void) {
    struct calm_stats stats = {0};
    fill_totals(&stats);
#define GAUGE(name)
#define TOTAL(name)                           calm_arena.totals_at_fork.name = stats.name;
#define COUNTER(name, unit, kind, place, ...) kind(name)
#include "api/counters.def"
}

void counters_print(struct text *text, const char *format) {
    struct calm_stats stats;
    counters_fill(&stats);
#define COUNTER(name, ...) text_format(text, format, #name, stats.name, #name);
#include "api/counters.def"
}
