/*
 * The table that other processes read (os/counter_table.h): the counters of counters.def that are words of
 * the first heap, of the caches and of the server, or sums of such; and some options. The note that leads to
 * the table is in counters.c.
 */
#include "api/features.h"
#include "api/layout.h"
#include "api/options.h"
#include "api/state.h"
#include "calmalloc.h"
#include "os/control.h"
#include "os/counter_table.h"

#define HEAP         calm_governor.heap
#define WORD(place)  .at = &(place), .bytes = sizeof(place)
#define PAGES(place) WORD(place), .unit = COUNTER_PAGES
/* Blocks of a class count for its size. */
#define BY_CLASS \
    .count = SIZE_CLASSES, .weights = &calm_classes.of[0].size, .weight_stride = sizeof(struct size_class)

#ifndef CALM_OFFLOAD
static const uint64_t zero;
#endif

static const struct counter_term terms[] = {
    {"footprint", PAGES(HEAP.used_pages)},
    {"footprint", PAGES(HEAP.claimed_pages), .flags = COUNTER_SUBTRACT},
    {"footprint", PAGES(HEAP.runs.sets[RUN_DIRTY].pages)},
    {"footprint", PAGES(HEAP.runs.sets[RUN_HUGE_DIRTY].pages)},
    {"footprint", PAGES(HEAP.slab_dirty_pages)},
    {"footprint", PAGES(HEAP.purging_pages)},
    {"in_use", PAGES(HEAP.used_pages)},
    {"in_use", PAGES(HEAP.claimed_pages), .flags = COUNTER_SUBTRACT},
    {"retained", PAGES(HEAP.runs.sets[RUN_DIRTY].pages)},
    {"retained", PAGES(HEAP.runs.sets[RUN_HUGE_DIRTY].pages)},
    {"retained", PAGES(HEAP.slab_dirty_pages)},
    {"retained", PAGES(HEAP.purging_pages)},
    {"retained_limit", PAGES(calm_governor.limit_pages)},
    {
        "cached",
        .at = &calm_caches.base,
        .pointers = 1,
        .rows = &calm_caches.count,
        .present = &calm_caches.states,
        .present_offset = offsetof(struct cpu_cache_state, open),
        .present_stride = sizeof(struct cpu_cache_state),
        .row_stride = CPU_CACHE_BYTES,
        .stride = sizeof(uint64_t),
        .bytes = sizeof(uint64_t),
        .less = calm_caches.start_of,
        BY_CLASS,
    },
    {
        "cached",
        .at = &calm_governor.depots[0].bins,
        .pointers = MAX_DEPOTS,
        .pointer_stride = sizeof(struct depot),
        .offset = offsetof(struct depot_bin, count),
        .stride = sizeof(struct depot_bin),
        .bytes = sizeof(uint32_t),
        BY_CLASS,
    },
    {
        "cache_misses",
        .at = &calm_governor.misses[0].count,
        .stride = sizeof(struct miss_counter),
        .count = MISS_COUNTERS,
        .bytes = sizeof(uint64_t),
    },
#define GOVERNOR(name, word)       {name, WORD(calm_governor.word)},
#define GOVERNOR_PAGES(name, word) {name, PAGES(calm_governor.word)},
#define CACHES(name, word)         {name, WORD(calm_caches.word)},
#ifdef CALM_OFFLOAD
#define SERVER(name, word) {name, WORD(calm_offload.server.word)},
#else
#define SERVER(name, word) {name, WORD(zero)},
#endif
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(#name, word)
#include "api/counters.def"
    {"slack", WORD(calm_options.slack)},
    {"purge_time", WORD(calm_options.purge_time)},
    {"policy", WORD(calm_options.test_policy)},
    {"background", WORD(calm_options.background)},
};

__attribute__((used, visibility("hidden"))) const struct counter_table calm_counter_table =
    COUNTER_TABLE("calmalloc", terms, .release = CALM_RELEASE, .control = &os_control,
                  .samples = HEAP_PROFILE_LAYOUT, .blocks = &calm_blocks);
