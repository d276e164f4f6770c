#include "api/statistics.h"

#include "api/layout.h"
#include "api/options.h"
#include "api/profiling.h"
#include "api/state.h"
#include "governor/blocks.h"
#include "governor/flush.h"
#include "governor/governor.h"
#include "offload/backend_offload.h"
#include "os/control.h"
#include "os/figures.h"
#include "os/syscall.h"
#include "profile/samples.h"

#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

/* The constant part of what caches may keep alive: each block at worst alone on its pages. */
static size_t cached_limit(const struct governor *governor) {
    size_t page = governor->heap.space.page_size;
    size_t bytes = cpu_caches_most_bytes(governor->caches);
    size_t blocks = cpu_caches_most_blocks(governor->caches);
    for (unsigned i = 0; i < governor->depot_count; i++) {
        size_t more;
        blocks += depot_blocks_most(&governor->depots[i], &more);
        bytes += more;
    }
    return bytes + blocks * page;
}

/* Of one heap: the second one's are added to the first one's. */
static void add_heap(struct calm_stats *stats, struct governor *governor) {
    governor_lock(governor);
    const struct heap *heap = &governor->heap;
    uint64_t page = heap->space.page_size;
    const struct governor_counts *counts = &governor->counts;
    stats->in_use += heap_used_pages(heap) * page;
    stats->retained += (heap_dirty_pages(heap) + heap->purging_pages) * page;
    stats->reserved += space_reserved_bytes(&heap->space);
    stats->metadata += space_metadata_bytes(&heap->space);
    stats->retained_limit += governor_limit_bytes(governor);
    stats->dirtied += heap->dirtied_pages * page;
    stats->purged += counts->purged_pages * page;
    stats->purges += counts->purges;
    stats->purges_timed += counts->purges_timed;
    stats->purges_asked += counts->purges_asked;
    stats->purge_failures += counts->failures;
    stats->purge_vectored_calls += counts->vectored_calls;
    stats->purge_single_calls += counts->single_calls;
    stats->purge_ranges += counts->ranges;
    stats->purge_vain_ns += counts->vain_ns;
    stats->heap_locks += governor->heap_locks;
    stats->large_allocations += heap->large_allocations;
    stats->large_moves += heap->moves;
    governor_unlock(governor);
}

static void fill(struct governor *governor, void *subject) {
    struct calm_stats *stats = subject;
    add_heap(stats, governor);
    if (governor == &calm_governor) {
        size_t cached;
        governor_cached(governor, &cached);
        stats->cached = cached;
        stats->cached_limit = cached_limit(governor);
        stats->cache_drains = atomic_load_explicit(&governor->caches->drains, memory_order_relaxed);
        stats->cache_misses = governor_cache_misses(governor);
        calm_allocator.backend->functions->add_counters(calm_allocator.backend, stats);
    }
}

/* Of a server that does not answer, counters are read while they change: each is a moment's value. Apart, since
 * ThreadSanitizer is told to ignore it by this name. */
static __attribute__((noinline)) void fill_past_server(struct calm_stats *stats) {
    fill(&calm_governor, stats);
}

void statistics_fill(struct calm_stats *stats) {
    memset(stats, 0, sizeof *stats);
    stats->version = CALM_STATS_VERSION;
    stats->size = sizeof *stats;
    if (allocator_is_ready()) {
        struct backend *backend = calm_allocator.backend;
        if (!backend->functions->run(backend, fill, stats)) {
            fill_past_server(stats);
        }
        stats->footprint = stats->in_use + stats->retained;
        stats->metadata += profiling_bytes();
    }
}

#define FIELD(name) \
    { #name, offsetof(struct calm_stats, name) }

static const struct {
    const char *name;
    size_t offset;
} fields[] = {
    FIELD(footprint),
    FIELD(in_use),
    FIELD(retained),
    FIELD(cached),
    FIELD(reserved),
    FIELD(metadata),
    FIELD(retained_limit),
    FIELD(cached_limit),
    FIELD(dirtied),
    FIELD(purged),
    FIELD(purges),
    FIELD(purges_timed),
    FIELD(purges_asked),
    FIELD(purge_failures),
    FIELD(purge_vectored_calls),
    FIELD(purge_single_calls),
    FIELD(purge_ranges),
    FIELD(cache_drains),
    FIELD(cache_misses),
    FIELD(heap_locks),
    FIELD(large_allocations),
    FIELD(large_moves),
    FIELD(offload_hits),
    FIELD(offload_misses),
    FIELD(offload_calls),
    FIELD(offload_records),
    FIELD(offload_stocked),
    FIELD(offload_unused),
    FIELD(offload_wakes),
    FIELD(offload_naps),
    FIELD(offload_lost),
    FIELD(offload_lent),
    FIELD(purge_vain_ns),
};

static uint64_t field(const struct calm_stats *stats, size_t number) {
    uint64_t value;
    memcpy(&value, (const char *)stats + fields[number].offset, sizeof value);
    return value;
}

void statistics_json(struct text *text) {
    struct calm_stats stats;
    statistics_fill(&stats);
    text_string(text, "{\"allocator\": \"calmalloc\", \"version\": ");
    text_number(text, stats.version);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        text_string(text, ", \"");
        text_string(text, fields[i].name);
        text_string(text, "\": ");
        text_number(text, field(&stats, i));
    }
    text_string(text, ", \"options\": {");
    for (size_t i = 0; options_name(i) != NULL; i++) {
        const char *word;
        int value;
        options_value(i, &word, &value);
        text_string(text, i == 0 ? "\"" : ", \"");
        text_string(text, options_name(i));
        text_string(text, "\": ");
        if (word != NULL) {
            struct text copy = {0};
            text_string(&copy, word);
            copy.length = strcspn(word, "|");
            copy.bytes[copy.length] = '\0';
            text_json_string(text, copy.bytes);
        } else {
            text_number(text, (uint64_t)value);
        }
    }
    text_string(text, "}}");
}

/* What a process outside reads: of calm_stats all that takes no lock and no sum of this process's. */
#define WORD(label, place) \
    { .name = (label), .at = &(place), .bytes = sizeof(place) }
#define PAGES(label, place) \
    { .name = (label), .at = &(place), .bytes = sizeof(place), .unit = FIGURE_PAGES }
#define PAGES_LESS(label, place)                                                       \
    {                                                                                  \
        .name = (label), .at = &(place), .bytes = sizeof(place), .unit = FIGURE_PAGES, \
        .flags = FIGURE_SUBTRACT                                                       \
    }
/* Blocks of a class count for its size. */
#define BY_CLASS \
    .count = SIZE_CLASSES, .weights = &calm_classes.of[0].size, .weight_stride = sizeof(struct size_class)
#define DEPOT(number)                                                                           \
    {                                                                                           \
        .name = "cached", .at = &calm_governor.depots[number].shelves, .flags = FIGURE_THROUGH, \
        .offset = offsetof(struct depot_shelf, count), .stride = sizeof(struct depot_shelf),    \
        .bytes = sizeof(uint32_t), BY_CLASS                                                     \
    }
#define HEAP calm_governor.heap

extern const struct calm_figures {
    struct figures head;
    struct figure figure[50];
} calm_figures;

__attribute__((used, visibility("hidden"))) const struct calm_figures calm_figures =
    {
        .head = FIGURES_HEAD("calmalloc", calm_figures, .release = CALM_RELEASE, .control = &os_control,
                             .samples = &profiling_layout, .blocks = &calm_blocks),
        .figure =
            {
                PAGES("footprint", HEAP.used_pages),
                PAGES_LESS("footprint", HEAP.claimed_pages),
                PAGES("footprint", HEAP.runs.sets[RUN_DIRTY].pages),
                PAGES("footprint", HEAP.runs.sets[RUN_HUGE_DIRTY].pages),
                PAGES("footprint", HEAP.slab_dirty_pages),
                PAGES("footprint", HEAP.purging_pages),
                PAGES("in_use", HEAP.used_pages),
                PAGES_LESS("in_use", HEAP.claimed_pages),
                PAGES("retained", HEAP.runs.sets[RUN_DIRTY].pages),
                PAGES("retained", HEAP.runs.sets[RUN_HUGE_DIRTY].pages),
                PAGES("retained", HEAP.slab_dirty_pages),
                PAGES("retained", HEAP.purging_pages),
                PAGES("retained_limit", calm_governor.limit_pages),
                {
                    .name = "cached",
                    .at = &calm_caches.regions,
                    .flags = FIGURE_THROUGH,
                    .rows = &calm_caches.count,
                    .present = &calm_caches.states,
                    .present_offset = offsetof(struct region_state, open),
                    .present_stride = sizeof(struct region_state),
                    .row_stride = REGION_BYTES,
                    .stride = sizeof(uint64_t),
                    .bytes = sizeof(uint64_t),
                    .less = calm_caches.start_of,
                    BY_CLASS,
                },
                DEPOT(0),
                DEPOT(1),
                DEPOT(2),
                DEPOT(3),
                DEPOT(4),
                DEPOT(5),
                DEPOT(6),
                DEPOT(7),
                PAGES("dirtied", HEAP.dirtied_pages),
                PAGES("purged", calm_governor.counts.purged_pages),
                WORD("purges", calm_governor.counts.purges),
                WORD("purges_timed", calm_governor.counts.purges_timed),
                WORD("purges_asked", calm_governor.counts.purges_asked),
                WORD("purge_failures", calm_governor.counts.failures),
                WORD("purge_vectored_calls", calm_governor.counts.vectored_calls),
                WORD("purge_single_calls", calm_governor.counts.single_calls),
                WORD("purge_ranges", calm_governor.counts.ranges),
                WORD("purge_ns", calm_governor.counts.purge_ns),
                WORD("purge_vain_ns", calm_governor.counts.vain_ns),
                WORD("cache_drains", calm_caches.drains),
                {
                    .name = "cache_misses",
                    .at = &calm_governor.misses[0].count,
                    .stride = sizeof(struct miss_counter),
                    .count = MISS_COUNTERS,
                    .bytes = sizeof(uint64_t),
                },
                WORD("heap_locks", calm_governor.heap_locks),
                WORD("looks", calm_governor.checks),
                WORD("large_allocations", HEAP.large_allocations),
                WORD("large_moves", HEAP.moves),
                WORD("offload_calls", calm_offload.server.counts.calls),
                WORD("offload_records", calm_offload.server.counts.records),
                WORD("offload_stocked", calm_offload.server.counts.stocked),
                WORD("offload_unused", calm_offload.server.counts.unused),
                WORD("offload_wakes", calm_offload.server.wakes),
                WORD("offload_naps", calm_offload.server.counts.naps),
                WORD("offload_lent", calm_offload.server.counts.lent),
                WORD("slack", calm_governor.settings.slack),
                WORD("purge_time", calm_governor.settings.purge_time),
                WORD("policy", calm_governor.settings.policy),
                WORD("background", calm_governor.settings.background),
            },
};
_Static_assert(MAX_DEPOTS == 8, "a term for each depot");
FIGURES_NOTE(calm_figures);

/* Programs close their stderr before the last destructors run: the report has a descriptor of its own, unless
 * the program closed that one too and uses its number. */
static int report_descriptor = -1;
static struct stat report_file;

static bool is_report_file(int descriptor) {
    struct stat file = {0};
    return os_syscall(SYS_fstat, descriptor, (long)&file, 0, 0, 0, 0) == 0 &&
           file.st_dev == report_file.st_dev && file.st_ino == report_file.st_ino;
}

void statistics_prepare_report(void) {
    if (options_report() == OPTION_REPORT_EXIT && report_descriptor < 0 &&
        os_syscall(SYS_fstat, 2, (long)&report_file, 0, 0, 0, 0) == 0) {
        long copy = os_syscall(SYS_fcntl, 2, F_DUPFD_CLOEXEC, 64, 0, 0, 0);
        report_descriptor = copy >= 0 ? (int)copy : 2;
    }
}

void statistics_report(void) {
    if (options_report() != OPTION_REPORT_EXIT || report_descriptor < 0) {
        return;
    }
    struct text line = {0};
    statistics_json(&line);
    text_string(&line, "\n");
    if (is_report_file(report_descriptor)) {
        text_write(&line, report_descriptor);
    }
}

#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

#if defined(__GLIBC__)

EXPORT struct mallinfo2 mallinfo2(void) {
    struct calm_stats stats;
    statistics_fill(&stats);
    return (struct mallinfo2){
        .arena = stats.footprint,
        .ordblks = 1,
        .uordblks = stats.in_use - (stats.cached < stats.in_use ? stats.cached : stats.in_use),
        .fordblks = stats.retained + stats.cached,
        .keepcost = stats.retained,
    };
}

/* Of int: what does not fit is the greatest that does. */
static int clamped(size_t number) {
    return number > __INT_MAX__ ? __INT_MAX__ : (int)number;
}

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
EXPORT struct mallinfo mallinfo(void) {
    struct mallinfo2 info = mallinfo2();
    return (struct mallinfo){
        .arena = clamped(info.arena),
        .ordblks = clamped(info.ordblks),
        .uordblks = clamped(info.uordblks),
        .fordblks = clamped(info.fordblks),
        .keepcost = clamped(info.keepcost),
    };
}
#pragma GCC diagnostic pop

#endif

EXPORT void malloc_stats(void) {
    struct calm_stats stats;
    statistics_fill(&stats);
    struct text page = {0};
    text_string(&page, "calmalloc:\n");
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        text_string(&page, "  ");
        text_string(&page, fields[i].name);
        text_string(&page, ": ");
        text_number(&page, field(&stats, i));
        text_string(&page, "\n");
    }
    text_write(&page, 2);
}

EXPORT int malloc_info(int options, FILE *stream);
EXPORT int malloc_info(int options, FILE *stream) {
    if (options != 0) {
        errno = EINVAL;
        return -1;
    }
    struct calm_stats stats;
    statistics_fill(&stats);
    struct text page = {0};
    text_string(&page, "<malloc version=\"calmalloc-1\">\n");
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        text_string(&page, "<");
        text_string(&page, fields[i].name);
        text_string(&page, ">");
        text_number(&page, field(&stats, i));
        text_string(&page, "</");
        text_string(&page, fields[i].name);
        text_string(&page, ">\n");
    }
    text_string(&page, "</malloc>\n");
    return fwrite(page.bytes, 1, page.length, stream) == page.length ? 0 : -1;
}

#endif
