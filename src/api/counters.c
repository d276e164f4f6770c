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

/* Adds the totals that each arena counts for itself. The caller holds the heap's
 * lock, or no other thread runs. */
static void add_arena_totals(struct calm_stats *stats, const struct arena *arena) {
    uint64_t page = arena->heap.space.page_size;
#define ALL(name, word)
#define ALL_PAGES(name, word)
#define HEAPS(name, word)       stats->name += arena->word;
#define HEAPS_PAGES(name, word) stats->name += arena->word * page;
#define CACHES(name, word)
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
}

/* Stores the totals that are counted once for the process. */
static void fill_totals(struct calm_stats *stats) {
    const struct arenas *arenas = &calm_arenas;
    uint64_t page = page_bytes(arenas);
#define ALL(name, word)       stats->name = arenas->word;
#define ALL_PAGES(name, word) stats->name = arenas->word * page;
#define HEAPS(name, word)
#define HEAPS_PAGES(name, word)
#define CACHES(name, word) stats->name = calm_caches.word;
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
    stats->cache_misses = arena_cache_misses(arenas);
}

/* Subtracts what the parent of a forked child had counted. */
static void subtract_parents(struct calm_stats *stats) {
#define GAUGE(name)
#define TOTAL(name)                           stats->name -= calm_arenas.totals_at_fork.name;
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
    struct arenas *arenas = &calm_arenas;
    uint64_t page = page_bytes(arenas);
    fill_totals(stats); /* before the arenas' counts: what was purged never exceeds what became dirty */
    struct levels totals = {0}; /* those of arenas->limit may lag behind */
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        const struct heap *heap = &arena->heap;
        lock_acquire(&arena->lock); /* heap_locks does not count this one */
        totals.used += heap_used_pages(heap);
        totals.dirty += heap_dirty_pages(heap);
        stats->dirty += heap->purging_pages * page;
        stats->reserved += space_reserved_bytes(&heap->space);
        stats->metadata += space_metadata_bytes(&heap->space) + sizeof *arena;
        add_arena_totals(stats, arena);
        lock_release(&arena->lock);
    }
    stats->in_use = totals.used * page;
    stats->dirty += totals.dirty * page;
    stats->footprint = stats->in_use + stats->dirty;
    struct retention_terms terms = terms_now(arenas);
    stats->dirty_limit = limit_by(arenas, &terms, totals).max * page;
    stats->metadata += sizeof *arenas->work + heap_profile_bytes();
    arena_cached(arenas, &stats->cached);
    stats->cached_limit = arena_max_cached(arenas);
    stats->cache_lock_reason = calm_caches.lock_reason;
    subtract_parents(stats);
}

void counters_start_child(void) {
    struct calm_stats stats = {0};
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(&calm_arenas, &number)) != NULL;) {
        add_arena_totals(&stats, arena);
    }
    fill_totals(&stats);
#define GAUGE(name)
#define TOTAL(name)                           calm_arenas.totals_at_fork.name = stats.name;
#define COUNTER(name, unit, kind, place, ...) kind(name)
#include "api/counters.def"
}

void counters_print(struct text *text, const char *format) {
    struct calm_stats stats;
    counters_fill(&stats);
#define COUNTER(name, ...) text_format(text, format, #name, stats.name, #name);
#include "api/counters.def"
}
