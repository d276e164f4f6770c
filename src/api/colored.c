#include "api/colored.h"

#include "api/misuse.h"
#include "calmalloc.h"
#include "os/address_space.h"
#include "os/caches.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/eviction.h"
#include "os/filters.h"
#include "os/pagemap.h"
#include "os/small_pages.h"
#include "placement/balance.h"
#include "placement/conflicts.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#define BLOCKS_MOST 1024
#define LEVEL_MOST  255 /* of a cache; the bits above say how colors are found */

/* Pages of an even larger block are as unlikely to be worth a search. */
#define PAGES_MOST ((size_t)1 << 24)

/* More are not found by time while anybody waits. */
#define COLORS_TIMED_MOST 64
#define TIMED_TRIES       5

/* Several times what it takes on a quiet CPU, which grows with the block. */
#define TIMED_NS       10000000000U
#define TIMED_NS_BYTES ((size_t)32 << 20)

/* ---- the blocks there are ---- */

/* In place of a block's address: none, and one that is made or freed just now. */
enum { SLOT_FREE, SLOT_TAKEN };

/* A mapping that is the slot's. */
struct held {
    _Atomic(char *) base;
    size_t bytes;
};

struct slot {
    _Atomic(uintptr_t) block;
    struct held home;
    struct held surplus; /* while the block is made, as the next */
    struct held scratch;
    size_t mappings; /* beyond one, that the block is */
    struct calm_colored report;
};

static struct slot slots[BLOCKS_MOST];

/* Of which so many were ever in use: a fork should not have to look at the others. */
static _Atomic(size_t) slots_reached;

static void reach(size_t slot) {
    size_t reached = atomic_load_explicit(&slots_reached, memory_order_relaxed);
    while (reached <= slot &&
           !atomic_compare_exchange_weak_explicit(&slots_reached, &reached, slot + 1, memory_order_relaxed,
                                                  memory_order_relaxed)) {
    }
}

/* A slot goes from one state to another by whoever finds it in the first. */
static struct slot *slot_claim(uintptr_t from) {
    for (size_t i = 0; i < BLOCKS_MOST; i++) {
        uintptr_t expected = from;
        if (atomic_load_explicit(&slots[i].block, memory_order_relaxed) != from) {
            continue;
        }
        reach(i);
        if (atomic_compare_exchange_strong_explicit(&slots[i].block, &expected, SLOT_TAKEN,
                                                    memory_order_acquire, memory_order_relaxed)) {
            return &slots[i];
        }
    }
    return NULL;
}

static void slot_set(struct slot *slot, uintptr_t to) {
    atomic_store_explicit(&slot->block, to, memory_order_release);
}

/* New address space, NULL if there is none. */
static char *hold(struct held *held, size_t bytes) {
    char *base = os_reserve(bytes, os_page_size());
    held->bytes = bytes;
    atomic_store_explicit(&held->base, base, memory_order_release);
    return base;
}

/* Forgotten first: at once another thread may have a mapping there, which a child must not unmap. */
static void let_go(struct held *held) {
    char *base = atomic_exchange_explicit(&held->base, NULL, memory_order_acq_rel);
    if (base != NULL) {
        os_release(base, held->bytes);
    }
}

/* What the slot holds goes back, all of it. */
static void slot_clear(struct slot *slot) {
    let_go(&slot->scratch);
    let_go(&slot->surplus);
    let_go(&slot->home);
    page_mappings_return(slot->mappings);
    slot->mappings = 0;
    slot_set(slot, SLOT_FREE);
}

void colored_after_fork(void) {
    size_t mappings = 0;
    size_t reached = atomic_load_explicit(&slots_reached, memory_order_relaxed);
    for (size_t i = 0; i < reached; i++) {
        /* By a thread that is not here. */
        if (atomic_load_explicit(&slots[i].block, memory_order_acquire) == SLOT_TAKEN) {
            slot_clear(&slots[i]);
        }
        mappings += slots[i].mappings;
    }
    page_mappings_after_fork(mappings);
}

/* ---- choosing pages ---- */

/* One allocation at work. */
struct work {
    const char *root;
    size_t page_bytes;
    size_t places; /* pages of the block */
    unsigned source;
    struct os_cache cache;
    size_t colors;
    size_t first;      /* color of the first place */
    uint64_t deadline; /* of what is found out by time */

    char *surplus; /* pages of it are resident, most can be */
    size_t pages;
    size_t most;

    uint64_t *frames; /* this and what follows: each for most pages */
    uint32_t *chosen;
    uint32_t *next;
    uint16_t *color_of;
};

static size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

/* 0, or why the cache has no colors. */
static int find_cache(struct work *work, unsigned level) {
    struct os_cache caches[CACHES_MOST];
    size_t count = os_caches(work->root, caches, CACHES_MOST);
    for (size_t i = 0; i < count; i++) {
        size_t way_bytes = os_cache_way_bytes(&caches[i]);
        if (caches[i].level == level && (caches[i].sets & (caches[i].sets - 1)) == 0 &&
            way_bytes > work->page_bytes && way_bytes / work->page_bytes <= BALANCE_COLORS_MOST) {
            work->cache = caches[i];
            work->colors = way_bytes / work->page_bytes;
            return 0;
        }
    }
    return ENOTSUP;
}

/* Makes more of the surplus resident. */
static int have_pages(struct work *work, size_t pages) {
    pages = pages < work->most ? pages : work->most;
    if (pages <= work->pages) {
        return 0;
    }
    char *fresh = work->surplus + work->pages * work->page_bytes;
    size_t bytes = (pages - work->pages) * work->page_bytes;
    /* Who asks for a surplus should not be the one for whom others are killed. */
    if (filters_now() == FILTERS_ADDED || bytes > small_pages_available(work->root) / 2 ||
        cgroup_memory_room() < bytes || !small_pages_commit(fresh, bytes) ||
        !small_pages_populate(fresh, bytes)) {
        return ENOMEM;
    }
    work->pages = pages;
    return 0;
}

static int color_by_frames(struct work *work) {
    int error = pagemap_frames(work->root, work->surplus, work->pages, work->frames);
    for (size_t i = 0; error == 0 && i < work->pages; i++) {
        work->color_of[i] =
            work->frames[i] == PAGEMAP_ABSENT ? BALANCE_UNKNOWN : (uint16_t)(work->frames[i] % work->colors);
    }
    return error;
}

static bool can_be_timed(const struct work *work) {
    return eviction_can_time() && work->colors <= COLORS_TIMED_MOST;
}

static bool is_past(const void *deadline) {
    return clock_now_ns() >= *(const uint64_t *)deadline;
}

static bool open_timing(const struct work *work, struct eviction *eviction, struct conflicts *conflicts) {
    *conflicts = (struct conflicts){.evicts = eviction_evicts,
                                    .cache = eviction,
                                    .is_over = is_past,
                                    .bound = &work->deadline,
                                    .colors = work->colors,
                                    .ways = work->cache.ways};
    return eviction_open(eviction, work->surplus, work->pages, work->page_bytes, &work->cache, work->colors);
}

static int color_by_time(struct work *work) {
    struct eviction eviction;
    struct conflicts conflicts;
    for (int tries = 0; tries < TIMED_TRIES && !is_past(&work->deadline); tries++) {
        /* Room for two numbers a page, which frames do not need now. */
        if (open_timing(work, &eviction, &conflicts) &&
            conflicts_find(&conflicts, work->pages, clock_now_ns(), work->color_of,
                           (uint32_t *)(void *)work->frames)) {
            return 0;
        }
    }
    return EAGAIN;
}

/* Whether what the frames say is so. */
static bool frames_hold(struct work *work) {
    struct eviction eviction;
    struct conflicts conflicts;
    return open_timing(work, &eviction, &conflicts) &&
           conflicts_confirm(&conflicts, work->color_of, work->pages, work->next);
}

static struct balance choose(struct work *work) {
    return balance_choose(work->color_of, work->pages, work->colors, work->first, work->places, work->chosen,
                          work->next);
}

/* Makes so many pages resident, and reads their frames. */
static int have_frames(struct work *work, size_t pages) {
    int error = have_pages(work, pages);
    error = error != 0 ? error : color_by_frames(work);
    return error == 0 || error == EPERM || error == ENOMEM ? error : ENOTSUP;
}

/* A quarter more than are wanted first, and more as long as that is not enough: where memory is in use for
 * long, some colors are rare. */
static int choose_by_frames(struct work *work, struct balance *balance) {
    /* One page tells whether the kernel shows frames at all. */
    int error = have_frames(work, 1);
    size_t pages = work->places + work->places / 4 + 4 * work->colors;
    error = error != 0 ? error : have_frames(work, pages);
    while (error == 0) {
        *balance = choose(work);
        if (balance->misplaced == 0 || work->pages == work->most) {
            return 0;
        }
        pages += pages / 2;
        /* Of those there are, the best are chosen, if there can be no more. */
        if (have_pages(work, pages) != 0) {
            return 0;
        }
        error = have_frames(work, pages);
    }
    return error;
}

/* Enough to tell colors by time, all at once. */
static int choose_by_time(struct work *work, struct balance *balance) {
    int error = have_pages(work, work->most);
    error = error != 0 ? error : color_by_time(work);
    if (error == 0) {
        *balance = choose(work);
    }
    return error;
}

static int choose_by_either(struct work *work, struct balance *balance) {
    int error = have_pages(work, work->most);
    if (error != 0) {
        return error;
    }
    if (color_by_frames(work) == 0 && frames_hold(work)) {
        work->source = CALM_COLORED_FRAMES;
        *balance = choose(work);
        return 0;
    }
    work->source = CALM_COLORED_TIMED;
    return choose_by_time(work, balance);
}

/* ---- making a block of them ---- */

static bool open_work(struct work *work, struct slot *slot) {
    size_t timed = larger(2 * work->places, conflicts_pages_least(work->colors, work->cache.ways));
    work->most = work->source == CALM_COLORED_FRAMES ? 4 * work->places + 16 * work->colors : timed;
    size_t scratch_bytes = work->most * (sizeof *work->frames + sizeof *work->chosen + sizeof *work->next +
                                         sizeof *work->color_of);
    scratch_bytes += work->page_bytes - scratch_bytes % work->page_bytes;
    work->surplus = hold(&slot->surplus, work->most * work->page_bytes);
    char *scratch = hold(&slot->scratch, scratch_bytes);
    if (work->surplus == NULL || scratch == NULL || !os_commit(scratch, scratch_bytes)) {
        return false;
    }
    work->frames = (uint64_t *)(void *)scratch;
    work->chosen = (uint32_t *)(work->frames + work->most);
    work->next = work->chosen + work->most;
    work->color_of = (uint16_t *)(work->next + work->most);
    return true;
}

/* The chosen pages, in a mapping of their own, the slot's home. 0, or why they cannot be moved there. */
static int settle(const struct work *work, struct slot *slot) {
    size_t bytes = work->places * work->page_bytes;
    char *home = hold(&slot->home, bytes);
    if (home == NULL || !small_pages_commit(home, bytes)) {
        return ENOMEM;
    }
    struct page_mover mover;
    int error = 0;
    page_mover_open(&mover, home, bytes);
    for (size_t i = 0; i < work->places && error == 0; i++) {
        error = page_mover_move(&mover, work->surplus + work->chosen[i] * work->page_bytes,
                                home + i * work->page_bytes);
    }
    page_mover_close(&mover);
    slot->mappings = mover.mappings;
    return error;
}

/* Block after block begins far from where those before it did: by an odd step, as colors are a power of two.
 */
static size_t next_first_color(size_t colors) {
    static _Atomic(size_t) blocks;
    size_t turn = atomic_fetch_add_explicit(&blocks, 1, memory_order_relaxed);
    return turn * ((colors / 2 + colors / 8) | 1) % colors;
}

/* Makes the slot's home. 0, or why there is none. */
static int work_for(struct work *work, struct slot *slot) {
    struct balance balance = {0, 0};
    if (!open_work(work, slot)) {
        return ENOMEM;
    }
    work->deadline =
        clock_now_ns() + TIMED_NS * (1 + (uint64_t)(work->places * work->page_bytes / TIMED_NS_BYTES));
    int error = work->source == CALM_COLORED_FRAMES  ? choose_by_frames(work, &balance)
                : work->source == CALM_COLORED_TIMED ? choose_by_time(work, &balance)
                                                     : choose_by_either(work, &balance);
    error = error != 0 ? error : settle(work, slot);
    slot->report = (struct calm_colored){
        .version = CALM_COLORED_VERSION,
        .level = work->cache.level,
        .colors = (uint32_t)work->colors,
        .source = work->source,
        .first_color = (uint32_t)work->first,
        .pages = work->places,
        .pages_examined = work->pages,
        .pages_misplaced = balance.misplaced,
        .pages_crowded = balance.crowded,
    };
    return error;
}

void *colored_alloc(const char *root, size_t bytes, unsigned cache, int *error) {
    const unsigned sources = CALM_COLORED_FRAMES | CALM_COLORED_TIMED;
    const unsigned level = cache & ~sources;
    struct work work = {.root = root, .page_bytes = os_page_size(), .source = cache & sources};
    work.places = bytes / work.page_bytes + (bytes % work.page_bytes != 0);
    if (bytes == 0 || level == 0 || level > LEVEL_MOST || work.source == sources) {
        *error = EINVAL;
        return NULL;
    }
    if (work.places > PAGES_MOST) {
        *error = ENOMEM;
        return NULL;
    }
    *error = find_cache(&work, level);
    if (*error == 0 && !can_be_timed(&work)) {
        *error = work.source == CALM_COLORED_TIMED ? ENOTSUP : 0;
        work.source = CALM_COLORED_FRAMES; /* by default: there is nothing to believe them by, and no other */
    }
    if (*error != 0) {
        return NULL;
    }
    struct slot *slot = slot_claim(SLOT_FREE);
    if (slot == NULL) {
        *error = ENOMEM;
        return NULL;
    }
    work.first = next_first_color(work.colors);
    *error = work_for(&work, slot);
    if (*error != 0) {
        slot_clear(slot);
        return NULL;
    }
    let_go(&slot->scratch);
    let_go(&slot->surplus);
    char *block = atomic_load_explicit(&slot->home.base, memory_order_relaxed);
    slot_set(slot, (uintptr_t)block);
    return block;
}

/* ---- what is asked of a block ---- */

void *calm_colored_alloc(size_t bytes, unsigned cache) {
    int error;
    void *block = colored_alloc("", bytes, cache, &error);
    if (block == NULL) {
        errno = error;
    }
    return block;
}

void calm_colored_free(void *block) {
    if (block == NULL) {
        return;
    }
    struct slot *slot = (uintptr_t)block == SLOT_TAKEN ? NULL : slot_claim((uintptr_t)block);
    if (slot == NULL) {
        misuse_report(MISUSE_INVALID_FREE, block);
        return;
    }
    slot_clear(slot);
}

/* Where the kernel shows no frames, what was so at first stays. */
static void count_misplaced(const char *block, struct calm_colored *report) {
    enum { FRAMES = 512 };
    uint64_t frames[FRAMES];
    size_t misplaced = 0;
    for (size_t page = 0; page < report->pages; page += FRAMES) {
        size_t count = report->pages - page < FRAMES ? report->pages - page : FRAMES;
        if (pagemap_frames("", block + page * os_page_size(), count, frames) != 0) {
            return;
        }
        for (size_t i = 0; i < count; i++) {
            misplaced += frames[i] == PAGEMAP_ABSENT ||
                         frames[i] % report->colors != (report->first_color + page + i) % report->colors;
        }
    }
    report->pages_misplaced = misplaced;
}

int calm_colored_stats(const void *block, struct calm_colored *colored, size_t size) {
    if (colored != NULL && size >= offsetof(struct calm_colored, level) && (uintptr_t)block > SLOT_TAKEN) {
        for (size_t i = 0; i < BLOCKS_MOST; i++) {
            if (atomic_load_explicit(&slots[i].block, memory_order_acquire) != (uintptr_t)block) {
                continue;
            }
            struct calm_colored report = slots[i].report;
            report.size = (uint32_t)(size < sizeof report ? size : sizeof report);
            if (report.source == CALM_COLORED_FRAMES) {
                count_misplaced(block, &report);
            }
            memcpy(colored, &report, report.size);
            return 0;
        }
    }
    errno = EINVAL;
    return -1;
}
