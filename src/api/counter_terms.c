/*
 * The table that other processes read (os/counter_table.h). It describes the
 * counters of counters.def that are words of the heap and the caches, or sums
 * of such words. It also has some options, and the addresses of the heap's
 * records (heap/blocks_layout.h). The note by which a reader finds the table is
 * in counters.c.
 */
#include "api/features.h"
#include "api/instance.h"
#include "calmalloc.h"
#include "heap/blocks_layout.h"
#include "os/control.h"
#include "os/counter_table.h"
#include "os/process.h"

#define WORD(place)  .at = &(place), .bytes = sizeof(place)
#define PAGES(place) WORD(place), .unit = COUNTER_PAGES
/* The sum over all arenas: a row for each. */
#define IN_ALL(word)                                                                                        \
    .at = &calm_arenas.of, .pointers = 1, .offset = offsetof(struct arena, word),                           \
    .bytes = sizeof calm_arenas.of->word, .rows = &calm_arenas.started, .row_stride = sizeof(struct arena), \
    .present = &present_arenas, .present_stride = 1
#define PAGES_IN_ALL(word) IN_ALL(word), .unit = COUNTER_PAGES
/* Each block counts for the size of its class. */
#define BY_CLASS \
    .count = SIZE_CLASSES, .weights = &calm_all_classes.of[0].size, .weight_stride = sizeof(struct size_class)

/* The states of the arenas: that of an unused one is 0. */
static const _Atomic(uint8_t) *const present_arenas = calm_arenas.states;

static const struct counter_term counter_term_list[] = {
    {"footprint", PAGES_IN_ALL(heap.used_pages)},
    {"footprint", PAGES_IN_ALL(heap.claimed_pages), .flags = COUNTER_SUBTRACT},
    {"footprint", PAGES_IN_ALL(heap.runs.sets[RUN_DIRTY].pages)},
    {"footprint", PAGES_IN_ALL(heap.runs.sets[RUN_HUGE_DIRTY].pages)},
    {"footprint", PAGES_IN_ALL(heap.slab_dirty_pages)},
    {"footprint", PAGES_IN_ALL(heap.purging_pages)},
    {"in_use", PAGES_IN_ALL(heap.used_pages)},
    {"in_use", PAGES_IN_ALL(heap.claimed_pages), .flags = COUNTER_SUBTRACT},
    {"dirty", PAGES_IN_ALL(heap.runs.sets[RUN_DIRTY].pages)},
    {"dirty", PAGES_IN_ALL(heap.runs.sets[RUN_HUGE_DIRTY].pages)},
    {"dirty", PAGES_IN_ALL(heap.slab_dirty_pages)},
    {"dirty", PAGES_IN_ALL(heap.purging_pages)},
    {"dirty_limit", PAGES(calm_arenas.limit.pages)},
    {
        "cached",
        .at = &calm_caches.base,
        .pointers = 1,
        .rows = &calm_caches.count,
        .present = &calm_caches.states,
        .present_offset = offsetof(struct cpu_cache_state, open),
        .present_stride = sizeof(struct cpu_cache_state),
        .row_stride = CPU_CACHE_BYTES,
        .stride = sizeof(void **),
        .bytes = sizeof(void **),
        .base_offset = STACK_BOTTOM_AT,
        .unit = COUNTER_WORDS,
        BY_CLASS,
    },
    {
        "cached",
        .at = &calm_arenas.depots[0].bins,
        .pointers = MAX_DEPOTS,
        .pointer_stride = sizeof(struct depot),
        .offset = offsetof(struct depot_bin, count),
        .stride = sizeof(struct depot_bin),
        .bytes = sizeof(uint32_t),
        BY_CLASS,
    },
    {
        "cache_misses",
        .at = &calm_arenas.misses[0].count,
        .stride = sizeof(struct miss_counter),
        .count = MISS_COUNTERS,
        .bytes = sizeof(uint64_t),
    },
/* Subtracts what the parent had counted before the fork. The counters concerned
 * are totals, never gauges. */
#define AT_FORK(name) \
    { #name, WORD(calm_arenas.totals_at_fork.name), .flags = COUNTER_SUBTRACT }
    AT_FORK(cache_misses),
    {"cache_lock_reason", WORD(calm_caches.lock_reason)},
#define ALL(name, word)         {#name, WORD(calm_arenas.word)}, AT_FORK(name),
#define ALL_PAGES(name, word)   {#name, PAGES(calm_arenas.word)}, AT_FORK(name),
#define HEAPS(name, word)       {#name, IN_ALL(word)}, AT_FORK(name),
#define HEAPS_PAGES(name, word) {#name, PAGES_IN_ALL(word)}, AT_FORK(name),
#define CACHES(name, word)      {#name, WORD(calm_caches.word)}, AT_FORK(name),
#define COMPUTED(name, word)
#define COUNTER(name, unit, kind, place, word, ...) place(name, word)
#include "api/counters.def"
#define OUTLOOK(name) \
    { #name, WORD(calm_arenas.epoch.outlook.name) }
    OUTLOOK(memory_per_cpu_bytes),
    OUTLOOK(break_even_ns),
    OUTLOOK(waiting_bytes),
    OUTLOOK(waiting_unused_ns),
    OUTLOOK(waiting_reuse_ns),
    OUTLOOK(waiting_until_ns),
    {"policy", WORD(calm_arenas.settings.policy)},
    {"background", WORD(calm_arenas.settings.background)},
};

#define IN_SPACE(word) offsetof(struct arena, heap.space.word)

static const struct blocks_layout counter_blocks = {
    .magic = {'c', 'a', 'l', 'm', 'b', 'l', 'k', 's'},
    .version = BLOCKS_LAYOUT_VERSION,
    .bytes = sizeof(struct blocks_layout),
    .heaps = &calm_arenas.of,
    .heap_count = &calm_arenas.started,
    .heap_bytes = sizeof(struct arena),
    .page_bytes = IN_SPACE(page_size),
    .spans = IN_SPACE(spans.memory[TABLE_SPANS].base),
    .spans_end = IN_SPACE(spans.end),
    .span_bytes = IN_SPACE(spans.span_bytes),
    .span_page = offsetof(struct span, page),
    .span_pages = offsetof(struct span, pages),
    .span_used_blocks = offsetof(struct span, used_blocks),
    .span_class = offsetof(struct span, size_class),
    .span_state = offsetof(struct span, state),
    .slab = SPAN_SLAB,
    .large = SPAN_LARGE,
    .pages = IN_SPACE(users_of),
    .page_users = PAGE_USERS,
    .page_dirty = PAGE_DIRTY,
    .segments = IN_SPACE(segment[0].region.base),
    .segment_count = IN_SPACE(segments),
    .segment_bytes = sizeof(struct segment),
    .heap_records = {IN_SPACE(page_tables[CLASS_TABLE].base), IN_SPACE(page_tables[SPAN_TABLE].base),
                     IN_SPACE(page_tables[USER_TABLE].base), IN_SPACE(spans.memory[TABLE_SPANS].base),
                     IN_SPACE(spans.memory[TABLE_FREE_SPANS].base),
                     IN_SPACE(spans.memory[TABLE_FREE_WORDS].base)},
    .class_bytes = sizeof(struct size_class),
    .classes = &calm_all_classes.of[0],
    .class_count = &calm_all_classes.count,
    .records = {&calm_arenas.work, &calm_caches.base, &calm_caches.states},
    .depots = &calm_arenas.depots[0].bins,
    .depot_count = MAX_DEPOTS,
    .depot_bytes = sizeof(struct depot),
};
_Static_assert(offsetof(struct size_class, size) == 0, "blocks_layout.h");

__attribute__((used, visibility("hidden"))) const struct counter_table calm_counter_table = COUNTER_TABLE(
    "calmalloc", counter_term_list, .release = CALM_RELEASE, .control = &os_control,
    .samples = HEAP_PROFILE_LAYOUT, .blocks = &counter_blocks, .process = &process_known.number);
