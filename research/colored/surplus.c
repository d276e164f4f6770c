#include "colored/surplus.h"

#include "base/assert.h"
#include "base/size.h"
#include "colored/balance.h"
#include "colored/conflicts.h"
#include "colored/eviction.h"
#include "colored/pagemap.h"
#include "os/clock.h"
#include "os/memory.h"
#include "os/mman.h"
#include "os/syscall.h"
#include "os/vm.h"

#include <errno.h>

/* More take too long to tell apart: each page is tested for one color after the other. */
#define MAX_TIMED_COLORS 64
#define MAX_TIMED_TRIES  5

/* Several times what it takes on a quiet CPU, which grows with the block. */
#define TIMED_NS       10000000000U
#define TIMED_NS_BYTES ((size_t)32 << 20)

/* ---- resident pages ---- */

static bool populate(char *base, size_t bytes) {
    long result;
    do {
        result = os_syscall(SYS_madvise, base, bytes, MADV_POPULATE_WRITE);
    } while (result == -EINTR || result == -EAGAIN);
    if (result == -EINVAL) { /* before Linux 5.14 */
        size_t page_bytes = vm_page_size();
        for (size_t at = 0; at < bytes; at += page_bytes) {
            *((volatile char *)base + at) = 0;
        }
        return true;
    }
    return result == 0;
}

/* Reserves address space for max_pages, with the scratch behind them. */
static bool reserve(struct surplus *surplus, struct page_range *mapping) {
    size_t timed = conflicts_min_pages(surplus->stats.colors, surplus->cache.ways);
    size_t pages = surplus->stats.source == CALM_COLORED_FRAMES
                       ? 4 * surplus->stats.pages + (size_t)16 * surplus->stats.colors
                       : size_max(timed, 2 * surplus->stats.pages);
    size_t bytes = pages * surplus->page_bytes;
    size_t scratch_bytes = pages * (sizeof *surplus->frames + sizeof *surplus->chosen +
                                    sizeof *surplus->next + sizeof *surplus->color_of);
    scratch_bytes += surplus->page_bytes - scratch_bytes % surplus->page_bytes;
    surplus->base = mapping_reserve(mapping, bytes + scratch_bytes);
    if (surplus->base == NULL || !vm_commit(surplus->base + bytes, scratch_bytes)) {
        return false;
    }
    surplus->max_pages = pages;
    surplus->frames = (uint64_t *)(void *)(surplus->base + bytes);
    surplus->chosen = (uint32_t *)(surplus->frames + pages);
    surplus->next = surplus->chosen + pages;
    surplus->color_of = (uint16_t *)(surplus->next + pages);
    return true;
}

/* Makes as many pages resident, of at most max_pages. */
static int surplus_grow(struct surplus *surplus, size_t pages) {
    pages = size_min(pages, surplus->max_pages);
    if (pages <= surplus->stats.pages_examined) {
        return 0;
    }
    char *fresh = surplus->base + surplus->stats.pages_examined * surplus->page_bytes;
    size_t bytes = (pages - surplus->stats.pages_examined) * surplus->page_bytes;
    size_t limit;
    /* A surplus must not make the kernel kill a process for lack of memory. */
    if (bytes > memory_available_bytes(surplus->root, &limit) / 2 || !vm_commit(fresh, bytes) ||
        !populate(fresh, bytes)) {
        return ENOMEM;
    }
    calm_assert(pages <= surplus->max_pages, pages, surplus->max_pages);
    surplus->stats.pages_examined = pages;
    return 0;
}

/* ---- colors ---- */

static int color_by_frames(struct surplus *surplus) {
    int error = pagemap_frames(surplus->root, surplus->base, surplus->stats.pages_examined, surplus->frames);
    for (size_t i = 0; error == 0 && i < surplus->stats.pages_examined; i++) {
        uint64_t frame = surplus->frames[i];
        surplus->color_of[i] =
            frame == PAGEMAP_ABSENT ? BALANCE_UNKNOWN : (uint16_t)(frame % surplus->stats.colors);
    }
    return error;
}

static bool is_past(const void *deadline) {
    return clock_now_ns() >= *(const uint64_t *)deadline;
}

static bool open_timing(const struct surplus *surplus, struct eviction *eviction,
                        struct conflicts *conflicts) {
    *conflicts = (struct conflicts){.evicts = eviction_evicts,
                                    .cache = eviction,
                                    .is_over = is_past,
                                    .bound = &surplus->deadline,
                                    .colors = surplus->stats.colors,
                                    .ways = surplus->cache.ways};
    return eviction_open(eviction, surplus->base, surplus->stats.pages_examined, surplus->page_bytes,
                         &surplus->cache, surplus->stats.colors);
}

static int color_by_time(struct surplus *surplus) {
    struct eviction eviction;
    struct conflicts conflicts;
    for (int tries = 0; tries < MAX_TIMED_TRIES && !is_past(&surplus->deadline); tries++) {
        /* Frames, not needed now, have room for two numbers a page. */
        if (open_timing(surplus, &eviction, &conflicts) &&
            conflicts_find(&conflicts, surplus->stats.pages_examined, clock_now_ns(), surplus->color_of,
                           (uint32_t *)(void *)surplus->frames)) {
            return 0;
        }
    }
    return EAGAIN;
}

/* Whether pages evict each other as their frames say. */
static bool frames_are_confirmed(struct surplus *surplus) {
    struct eviction eviction;
    struct conflicts conflicts;
    return open_timing(surplus, &eviction, &conflicts) &&
           conflicts_confirm(&conflicts, surplus->color_of, surplus->stats.pages_examined, surplus->next);
}

/* ---- the choice ---- */

static void choose(struct surplus *surplus) {
    calm_assert(surplus->stats.pages <= surplus->stats.pages_examined, surplus->stats.pages);
    struct calm_colored *stats = &surplus->stats;
    struct balance balance = balance_choose(surplus->color_of, stats->pages_examined, stats->colors,
                                            stats->first_color, stats->pages, surplus->chosen, surplus->next);
    stats->pages_misplaced = balance.misplaced;
    stats->pages_crowded = balance.crowded;
}

/* Makes so many pages resident, and determines their colors. */
static int grow_by_frames(struct surplus *surplus, size_t pages) {
    int error = surplus_grow(surplus, pages);
    error = error != 0 ? error : color_by_frames(surplus);
    return error == 0 || error == EPERM || error == ENOMEM ? error : ENOTSUP;
}

/* Begins with a quarter more pages than needed, and adds pages while some colors are short: where memory has
 * been in use for long, some are rare. */
static int choose_by_frames(struct surplus *surplus) {
    /* One page shows whether frames are hidden. */
    int error = grow_by_frames(surplus, 1);
    size_t pages = surplus->stats.pages + surplus->stats.pages / 4 + (size_t)4 * surplus->stats.colors;
    while (error == 0 && (error = grow_by_frames(surplus, pages)) == 0) {
        choose(surplus);
        pages += pages / 2;
        /* If there can be no more pages, the best choice of these stands. */
        if (surplus->stats.pages_misplaced == 0 || surplus->stats.pages_examined == surplus->max_pages ||
            surplus_grow(surplus, pages) != 0) {
            break;
        }
    }
    return error;
}

/* Timing needs all pages at once. By default, frames are used if timing confirms them. */
static int choose_by_timing(struct surplus *surplus) {
    int error = surplus_grow(surplus, surplus->max_pages);
    if (error != 0) {
        return error;
    }
    bool frames =
        surplus->stats.source == 0 && color_by_frames(surplus) == 0 && frames_are_confirmed(surplus);
    surplus->stats.source = frames ? CALM_COLORED_FRAMES : CALM_COLORED_TIMED;
    error = frames ? 0 : color_by_time(surplus);
    if (error == 0) {
        choose(surplus);
    }
    return error;
}

int surplus_choose(struct surplus *surplus, struct page_range *mapping) {
    if (!eviction_can_time() || surplus->stats.colors > MAX_TIMED_COLORS) {
        if (surplus->stats.source == CALM_COLORED_TIMED) {
            return ENOTSUP;
        }
        surplus->stats.source = CALM_COLORED_FRAMES; /* which nothing can confirm */
    }
    if (!reserve(surplus, mapping)) {
        return ENOMEM;
    }
    size_t block_bytes = surplus->stats.pages * surplus->page_bytes;
    surplus->deadline = clock_now_ns() + TIMED_NS * (1 + (uint64_t)(block_bytes / TIMED_NS_BYTES));
    return surplus->stats.source == CALM_COLORED_FRAMES ? choose_by_frames(surplus)
                                                        : choose_by_timing(surplus);
}
