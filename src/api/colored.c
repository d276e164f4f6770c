#include "api/colored.h"

#include "api/misuse.h"
#include "calmalloc.h"
#include "os/address_space.h"
#include "os/caches.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/eviction.h"
#include "os/pagemap.h"
#include "os/small_pages.h"
#include "placement/balance.h"
#include "placement/conflicts.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <string.h>

#define BLOCKS_MOST 1024

/* Pages of an even larger block are as unlikely to be worth a search. */
#define PAGES_MOST ((size_t)1 << 24)

/* More are not found by time while anybody waits. */
#define COLORS_TIMED_MOST 64
#define TIMED_TRIES       5

/* ---- the blocks there are ---- */

/* In place of a block's address: none, and one that is made or freed just now. */
enum { SLOT_FREE, SLOT_TAKEN };

struct slot {
    _Atomic(uintptr_t) block;
    struct calm_colored report;
};

static struct slot slots[BLOCKS_MOST];

/* A slot goes from one state to another by whoever finds it in the first. */
static struct slot *slot_claim(uintptr_t from) {
    for (size_t i = 0; i < BLOCKS_MOST; i++) {
        uintptr_t expected = from;
        if (atomic_load_explicit(&slots[i].block, memory_order_relaxed) == from &&
            atomic_compare_exchange_strong_explicit(&slots[i].block, &expected, SLOT_TAKEN,
                                                    memory_order_acquire, memory_order_relaxed)) {
            return &slots[i];
        }
    }
    return NULL;
}

static void slot_set(struct slot *slot, uintptr_t to) {
    atomic_store_explicit(&slot->block, to, memory_order_release);
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
    size_t first; /* color of the first place */

    char *surplus; /* pages of it are resident, most can be */
    size_t pages;
    size_t most;

    char *scratch; /* what follows, each for most pages */
    size_t scratch_bytes;
    uint64_t *frames;
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
    if (bytes > small_pages_available(work->root) / 2 || cgroup_memory_is_short() ||
        !small_pages_commit(fresh, bytes) || !small_pages_populate(fresh, bytes)) {
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

static bool open_timing(const struct work *work, struct eviction *eviction, struct conflicts *conflicts) {
    *conflicts = (struct conflicts){
        .evicts = eviction_evicts, .cache = eviction, .colors = work->colors, .ways = work->cache.ways};
    return eviction_open(eviction, work->surplus, work->pages, work->page_bytes, &work->cache, work->colors);
}

static int color_by_time(struct work *work) {
    struct eviction eviction;
    struct conflicts conflicts;
    if (work->colors > COLORS_TIMED_MOST || !eviction_can_time()) {
        return ENOTSUP;
    }
    for (int tries = 0; tries < TIMED_TRIES; tries++) {
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

/* A quarter more than are wanted first, and more as long as that is not enough: where memory is in use for
 * long, some colors are rare. */
static int choose_by_frames(struct work *work, struct balance *balance) {
    for (size_t pages = work->places + work->places / 4 + 4 * work->colors;; pages += pages / 2) {
        int error = have_pages(work, pages);
        error = error != 0 ? error : color_by_frames(work);
        if (error != 0) {
            return error == EPERM || error == ENOMEM ? error : ENOTSUP;
        }
        *balance = choose(work);
        if (balance->misplaced == 0 || work->pages == work->most) {
            return 0;
        }
    }
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

static bool open_work(struct work *work) {
    size_t timed = larger(2 * work->places, conflicts_pages_least(work->colors, work->cache.ways));
    work->most = work->source == CALM_COLORED_FRAMES ? 4 * work->places + 16 * work->colors : timed;
    work->scratch_bytes = work->most * (sizeof *work->frames + sizeof *work->chosen + sizeof *work->next +
                                        sizeof *work->color_of);
    work->scratch_bytes += work->page_bytes - work->scratch_bytes % work->page_bytes;
    work->surplus = os_reserve(work->most * work->page_bytes, work->page_bytes);
    work->scratch = os_reserve(work->scratch_bytes, work->page_bytes);
    if (work->surplus == NULL || work->scratch == NULL || !os_commit(work->scratch, work->scratch_bytes)) {
        return false;
    }
    work->frames = (uint64_t *)(void *)work->scratch;
    work->chosen = (uint32_t *)(work->frames + work->most);
    work->next = work->chosen + work->most;
    work->color_of = (uint16_t *)(work->next + work->most);
    return true;
}

static void close_work(const struct work *work) {
    if (work->surplus != NULL) {
        os_release(work->surplus, work->most * work->page_bytes);
    }
    if (work->scratch != NULL) {
        os_release(work->scratch, work->scratch_bytes);
    }
}

/* The chosen pages, in a mapping of their own. NULL if they cannot be moved there. */
static char *settle(const struct work *work, int *error) {
    size_t bytes = work->places * work->page_bytes;
    char *home = os_reserve(bytes, work->page_bytes);
    if (home == NULL || !small_pages_commit(home, bytes)) {
        *error = ENOMEM;
    } else {
        struct page_mover mover;
        page_mover_open(&mover, home, bytes);
        size_t moved = 0;
        while (moved < work->places &&
               page_mover_move(&mover, work->surplus + work->chosen[moved] * work->page_bytes,
                               home + moved * work->page_bytes)) {
            moved++;
        }
        page_mover_close(&mover);
        if (moved == work->places) {
            return home;
        }
        *error = ENOTSUP;
    }
    if (home != NULL) {
        os_release(home, bytes);
    }
    return NULL;
}

/* Block after block begins far from where those before it did: by an odd step, as colors are a power of two.
 */
static size_t next_first_color(size_t colors) {
    static _Atomic(size_t) blocks;
    size_t turn = atomic_fetch_add_explicit(&blocks, 1, memory_order_relaxed);
    return turn * ((colors / 2 + colors / 8) | 1) % colors;
}

static char *work_for(struct work *work, struct calm_colored *report, int *error) {
    struct balance balance = {0, 0};
    char *home = NULL;
    if (!open_work(work)) {
        *error = ENOMEM;
    } else {
        *error = work->source == CALM_COLORED_FRAMES  ? choose_by_frames(work, &balance)
                 : work->source == CALM_COLORED_TIMED ? choose_by_time(work, &balance)
                                                      : choose_by_either(work, &balance);
    }
    if (*error == 0) {
        home = settle(work, error);
    }
    close_work(work);
    *report = (struct calm_colored){
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
    return home;
}

void *colored_alloc(const char *root, size_t bytes, unsigned cache, int *error) {
    const unsigned sources = CALM_COLORED_FRAMES | CALM_COLORED_TIMED;
    struct work work = {.root = root, .page_bytes = os_page_size(), .source = cache & sources};
    work.places = bytes / work.page_bytes + (bytes % work.page_bytes != 0);
    if (bytes == 0 || (cache & ~sources) == 0 || work.source == sources) {
        *error = EINVAL;
        return NULL;
    }
    if (work.places > PAGES_MOST) {
        *error = ENOMEM;
        return NULL;
    }
    *error = find_cache(&work, cache & ~sources);
    if (*error != 0) {
        return NULL;
    }
    struct slot *slot = slot_claim(SLOT_FREE);
    if (slot == NULL) {
        *error = ENOMEM;
        return NULL;
    }
    work.first = next_first_color(work.colors);
    char *home = work_for(&work, &slot->report, error);
    slot_set(slot, home == NULL ? SLOT_FREE : (uintptr_t)home);
    return home;
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
    os_release(block, slot->report.pages * os_page_size());
    slot_set(slot, SLOT_FREE);
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
