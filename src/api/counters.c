#include "api/counters.h"

#include "api/features.h"
#include "api/state.h"
#include "governor/blocks.h"
#include "governor/flush.h"
#include "governor/governor.h"
#include "governor/limit.h"
#include "os/counter_table.h"

#include <string.h>

/* Here, where it makes the linker of a static program add counter_terms.c. */
COUNTER_TABLE_NOTE(calm_counter_table);

/* The constant limit: each block that a cache or depot may hold is alone on its pages at worst. */
static size_t cached_limit(const struct governor *governor) {
    size_t bytes;
    size_t blocks = cpu_caches_max_blocks(governor->caches, &bytes);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        size_t more;
        blocks += depot_max_blocks(&governor->depots[i], &more);
        bytes += more;
    }
    return bytes + blocks * page_bytes(governor);
}

/* Those of a heap, of which there may be a second one. */
static void add_totals_of_heap(const struct governor *governor, struct calm_stats *stats) {
    uint64_t page = page_bytes(governor);
#define GOVERNOR(name, word)       stats->name += governor->word;
#define GOVERNOR_PAGES(name, word) stats->name += governor->word * page;
#define CACHES(name, word)
#define SERVER(name, word)
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
}

/* And those that there are once; of the gauges what the backend adds. Without a server nothing of its memory
 * is touched. */
static void add_other_totals(struct calm_stats *stats) {
#ifdef CALM_OFFLOAD
    bool has_server = calm_allocator.backend->has_server;
#endif
#define GOVERNOR(name, word)
#define GOVERNOR_PAGES(name, word)
#define CACHES(name, word) stats->name = calm_caches.word;
#ifdef CALM_OFFLOAD
#define SERVER(name, word) stats->name = has_server ? calm_offload.server.word : 0;
#else
#define SERVER(name, word)
#endif
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
    stats->cache_misses = governor_cache_misses(&calm_governor);
    calm_allocator.backend->functions->add_counters(calm_allocator.backend, stats);
}

/* What the parent of a forked child had counted. */
static void subtract_parents(const struct governor *governor, struct calm_stats *stats) {
#define GAUGE(name)
#define TOTAL(name)                           stats->name -= governor->totals_at_fork.name;
#define COUNTER(name, unit, kind, place, ...) kind(name)
#include "api/counters.def"
}

/* Adds the counters of a heap; with the first, what there is one of. They are consistent in shared mode, or
 * on the thread of exclusive mode: it takes no lock, but the mode may change before the release. */
static void counters_add_governor(struct governor *governor, void *subject) {
    struct calm_stats *stats = subject;
    lock_acquire(&governor->lock);
    const struct heap *heap = &governor->heap;
    uint64_t page = page_bytes(governor);
    stats->in_use += heap_used_pages(heap) * page;
    stats->retained += (heap_dirty_pages(heap) + heap->purging_pages) * page;
    stats->reserved += space_reserved_bytes(&heap->space);
    stats->metadata += space_metadata_bytes(&heap->space);
    stats->retained_limit += limit_now(governor).max * page;
    add_totals_of_heap(governor, stats);
    lock_release(&governor->lock);
    if (governor == &calm_governor) {
        governor_cached(governor, &stats->cached);
        stats->cached_limit = cached_limit(governor);
        add_other_totals(stats);
    }
    subtract_parents(governor, stats);
}

/* Of a server that does not answer, counters are read while they change: each is a moment's value. Apart,
 * since ThreadSanitizer is told to ignore it by this name. */
static __attribute__((noinline)) void fill_past_server(struct calm_stats *stats) {
    counters_add_governor(&calm_governor, stats);
}

void counters_fill(struct calm_stats *stats) {
    memset(stats, 0, sizeof *stats);
    stats->version = CALM_STATS_VERSION;
    stats->size = sizeof *stats;
    if (allocator_is_ready()) {
        struct backend *backend = calm_allocator.backend;
        if (!backend->functions->run(backend, counters_add_governor, stats)) {
            fill_past_server(stats);
        }
        stats->footprint = stats->in_use + stats->retained;
        stats->metadata += heap_profile_bytes();
    }
}

static void start_child(struct governor *governor) {
    struct calm_stats stats = {0};
    add_totals_of_heap(governor, &stats);
    if (governor == &calm_governor) {
        add_other_totals(&stats);
    }
#define GAUGE(name)
#define TOTAL(name)                           governor->totals_at_fork.name = stats.name;
#define COUNTER(name, unit, kind, place, ...) kind(name)
#include "api/counters.def"
}

void counters_start_child(void) {
    start_child(&calm_governor);
#ifdef CALM_OFFLOAD
    if (calm_allocator.backend->has_server &&
        atomic_load_explicit(&calm_offload.second_made, memory_order_relaxed) > 0) {
        start_child(&calm_offload.second);
    }
#endif
}

void counters_print(struct text *text, const char *format) {
    struct calm_stats stats;
    counters_fill(&stats);
#define COUNTER(name, ...) text_format(text, format, #name, stats.name, #name);
#include "api/counters.def"
}
