/*
 * Large blocks: where a new one lies, whether its pages are resident before it is used, and how one grows or
 * shrinks.
 */
#include "governor/governor.h"

#include "governor/bound.h"
#include "governor/fault.h"
#include "governor/heap_door.h"
#include "os/address_space.h"
#include "os/caches.h"
#include "os/clock.h"
#include "os/seed.h"

/* Dearer to move than to copy below: see docs/experiments.md. */
#define MOVE_BYTES_LEAST ((size_t)256 << 10)

/*
 * In a huge region, if the program is one that touches its blocks, and the rest of the region, which is free
 * but will be resident, is well within the bound. Under the heap's lock.
 */
static enum run_choice choose_run(const struct governor *governor, size_t pages) {
    size_t region = governor->heap.runs.huge_pages;
    if (region == 0 || pages < DENSITY_PAGES_LEAST) {
        return RUN_FOR_ANY;
    }
    bool dense = governor->settings.huge_pages != 0 && density_is_high(&governor->density) &&
                 uses_enough_for_huge_pages(governor, pages) &&
                 heap_dirty_pages(&governor->heap) + region <= max_ahead_pages(governor) / 2;
    return dense ? RUN_FOR_DENSE : RUN_FOR_LARGE;
}

/*
 * An owner makes a new block resident before its client has it, if all large blocks are touched, so that the
 * client's first touch finds its pages there. Under the heap's lock; clean_pages are those before it was
 * taken.
 */
static bool is_to_be_ready(const struct governor *governor, void *block, bool zero, size_t clean_pages) {
    bool fresh = zero || governor->heap.runs.sets[RUN_CLEAN].pages < clean_pages;
    return fresh && density_expects_touch(&governor->density) &&
           !heap_large_span(&governor->heap, block)->huge;
}

/*
 * The machine is asked for its caches when huge pages first are, which costs far more. Under the heap's
 * lock.
 */
static void prepare_colors(struct governor *governor, enum run_choice choice) {
    struct heap *heap = &governor->heap;
    heap->spreads = setting_value(&governor->settings.placement) == PLACEMENT_COLORS;
    if (!heap->spreads || governor->knows_caches ||
        (choice != RUN_FOR_DENSE && heap->runs.huge_regions == 0)) {
        return;
    }
    governor->knows_caches = true;
    struct os_cache caches[CACHES_MOST];
    size_t count = os_caches("", caches, CACHES_MOST);
    /* Later caches first pass what the nearest one missed: that one goes by addresses, and lines are for it.
     */
    size_t outer = 0;
    while (outer < count && caches[outer].level < 2) {
        outer++;
    }
    colors_init(&heap->colors, caches + outer, count - outer, page_bytes(governor),
                heap->runs.huge_pages * page_bytes(governor), os_process_seed());
}

void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool *zero) {
    return governor_take_large_ready(governor, pages, align_pages, zero, false);
}

void *governor_take_large_ready(struct governor *governor, size_t pages, size_t align_pages, bool *zero,
                                bool wants_ready) {
    heap_enter(governor);
    enum run_choice choice = choose_run(governor, pages);
    uint64_t made = governor->heap.runs.huge_pages_made;
    size_t clean_pages = governor->heap.runs.sets[RUN_CLEAN].pages;
    prepare_colors(governor, choice);
    char *block = heap_take_large(&governor->heap, pages, align_pages, choice, zero);
    made = governor->heap.runs.huge_pages_made - made;
    bool ready = wants_ready && block != NULL && is_to_be_ready(governor, block, *zero, clean_pages);
    const char *base = NULL;
    size_t older_pages = 0;
    if (ready) {
        heap_large_span(&governor->heap, block)->ready = true;
    }
    if ((choice != RUN_FOR_ANY || governor->owner != NULL) && block != NULL) {
        const struct span *older = density_note(&governor->density, &governor->heap, block);
        base = older == NULL ? NULL : older->base;
        older_pages = older == NULL ? 0 : older->pages;
    }
    heap_leave(governor);
    if (made > 0 && block != NULL) {
        struct stopwatch watch = stopwatch_start();
        *(volatile char *)block = 0; /* the whole huge page comes with it */
        density_note_cost(&governor->density, stopwatch_ns(&watch),
                          (double)governor->heap.runs.huge_pages * fault_ns(governor));
    }
    if (base != NULL) {
        density_judge(&governor->density, base, older_pages * page_bytes(governor), page_bytes(governor));
    }
    if (ready) {
        os_populate(block, pages * page_bytes(governor));
    }
    return block;
}

/*
 * A program that reads its zeroed memory before it writes, as a hash table's does, has the kernel's page of
 * zeros first, and each page that then is written is a copy of it: two faults, and a shootdown. So the whole
 * block is written at once, as by an allocator that cannot know it to be zero; but only where such blocks, of
 * which a program may never touch most, and free memory that is kept are together within the bound.
 */
bool governor_may_populate(struct governor *governor, void *block, size_t pages) {
    if (setting_value(&governor->settings.populate) == 0 ||
        atomic_load_explicit(&governor->cannot_populate, memory_order_relaxed)) {
        return false;
    }
    heap_enter(governor);
    struct heap *heap = &governor->heap;
    bool within = heap_dirty_pages(heap) + heap->ahead_pages + pages <= max_ahead_pages(governor);
    if (within) {
        heap_note_ahead(heap, block);
    }
    heap_exit(governor);
    return within;
}

void governor_populate(struct governor *governor, void *block, size_t pages) {
    if (!os_populate(block, pages * page_bytes(governor))) {
        atomic_store_explicit(&governor->cannot_populate, true, memory_order_relaxed);
    }
}

void governor_put_large(struct governor *governor, void *block) {
    struct span *renew = NULL;
    heap_enter(governor);
    if (heap_put_large(&governor->heap, block, &renew) == PUT_RENEW) {
        heap_exit(governor);
        bool renewed = os_renew(renew->base, (size_t)renew->pages * page_bytes(governor));
        heap_enter(governor);
        heap_put_renewed(&governor->heap, renew, renewed);
    }
    heap_leave(governor);
}

void *governor_resize_large(struct governor *governor, struct span *span, size_t pages) {
    size_t held = span->pages;
    heap_enter(governor);
    bool resized = heap_resize_large(&governor->heap, span, pages);
    bool may_move = !resized && pages > held && held * page_bytes(governor) >= MOVE_BYTES_LEAST &&
                    heap_may_move(&governor->heap);
    bool zero;
    char *to_base = may_move ? heap_take_large(&governor->heap, pages, 1, RUN_FOR_MOVE, &zero) : NULL;
    heap_leave(governor);
    if (resized || to_base == NULL) {
        return resized ? span->base + span->offset : NULL;
    }
    size_t bytes = held * page_bytes(governor);
    if (!os_move_pages(span->base, to_base, bytes)) {
        /* Older kernels may have unmapped the place before they failed. Without it mapped anew, it is lost.
         */
        if (os_renew(to_base, bytes)) {
            governor_put_large(governor, to_base);
        }
        return NULL;
    }
    heap_enter(governor);
    struct span *to = heap_large_span(&governor->heap, to_base);
    heap_moved(&governor->heap, span, to);
    heap_leave(governor);
    return to->base + to->offset;
}
