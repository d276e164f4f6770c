#include "governor/large.h"

#include "governor/check.h"
#include "governor/fault_cost.h"
#include "governor/limit.h"
#include "os/hardware_caches.h"
#include "os/random.h"
#include "os/vm.h"

/* Smaller blocks cost more to move than to copy: see docs/experiments.md. */
#define MIN_MOVE_BYTES ((size_t)256 << 10)

/* In a huge-page region, if the program touches its large blocks. Under the heap's lock. */
static enum run_choice choose_run(const struct governor *governor, size_t pages) {
    if (governor->heap.runs.region_pages == 0 || pages < THP_MIN_PAGES) {
        return RUN_FOR_ANY;
    }
    bool dense = thp_policy_allows(&governor->thp) && allows_region(governor, pages);
    return dense ? RUN_FOR_HUGE_PAGES : RUN_FOR_LARGE;
}

/*
 * Whether to prefault a new block: if its pages are fresh, outside of huge-page regions, and all large blocks
 * are touched, so that the client's first touch finds its pages. Under the heap's lock; clean_pages are those
 * before it was taken.
 */
static bool is_to_be_prefaulted(const struct governor *governor, void *block, bool zero, size_t clean_pages) {
    bool fresh = zero || governor->heap.runs.sets[RUN_CLEAN].pages < clean_pages;
    return fresh && thp_policy_expects_touch(&governor->thp) &&
           !heap_large_span(&governor->heap, block)->huge;
}

/* Returns whether large blocks are spread by their colors. Reads what caches the machine has, once huge pages
 * are requested, which costs far more. Under the heap's lock. */
static bool prepare_colors(struct governor *governor, enum run_choice choice) {
    struct heap *heap = &governor->heap;
    bool colored = setting_value(&governor->settings.placement) == PLACEMENT_COLORS;
    if (!colored || governor->has_colors || (choice != RUN_FOR_HUGE_PAGES && heap->runs.regions == 0)) {
        return colored;
    }
    governor->has_colors = true;
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    /* The nearest cache is indexed by virtual addresses, which placement by lines spreads. */
    size_t outer = 0;
    while (outer < count && caches[outer].level < 2) {
        outer++;
    }
    colors_init(&heap->colors, caches + outer, count - outer, page_bytes(governor),
                heap->runs.region_pages * page_bytes(governor), random_process_seed());
    return colored;
}

void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool *zero,
                          bool prefaults) {
    heap_lock(governor);
    enum run_choice choice = choose_run(governor, pages);
    uint64_t made = governor->heap.runs.huge_pages_made;
    size_t clean_pages = governor->heap.runs.sets[RUN_CLEAN].pages;
    bool colored = prepare_colors(governor, choice);
    char *block = heap_take_large(&governor->heap, pages, align_pages, choice, colored, zero);
    made = governor->heap.runs.huge_pages_made - made;
    prefaults = prefaults && block != NULL && is_to_be_prefaulted(governor, block, *zero, clean_pages);
    struct iovec sampled = {0};
    if (prefaults) {
        heap_large_span(&governor->heap, block)->prefaulted = true;
    }
    if ((choice != RUN_FOR_ANY || governor->exclusive) && block != NULL) {
        sampled = thp_policy_note(&governor->thp, &governor->heap, block);
    }
    heap_unlock_and_check(governor);
    if (made > 0 && block != NULL) {
        touch_huge_page(governor, block);
    }
    if (sampled.iov_len > 0) {
        thp_policy_sample(&governor->thp, sampled.iov_base, sampled.iov_len, page_bytes(governor));
    }
    if (prefaults) {
        vm_populate(block, pages * page_bytes(governor));
    }
    return block;
}

/*
 * A program that reads its zeroed memory before it writes, as a hash table does, first maps the kernel's zero
 * page, and each page that it then writes is copied: two faults, and a shootdown. So the whole block is
 * written at once, as by an allocator that cannot know it to be zero; but only while such blocks, most of
 * which a program may never touch, and free memory that is kept are together within the limit.
 */
bool governor_may_populate(struct governor *governor, void *block, size_t pages) {
    if (setting_value(&governor->settings.populate) == 0 ||
        atomic_load_explicit(&governor->cannot_populate, memory_order_relaxed)) {
        return false;
    }
    heap_lock(governor);
    struct heap *heap = &governor->heap;
    bool within =
        heap_dirty_pages(heap) + heap->calloc_populated_pages + pages <= max_prefaulted_pages(governor);
    if (within) {
        heap_note_calloc_populated(heap, block);
    }
    heap_unlock(governor);
    return within;
}

void governor_populate(struct governor *governor, void *block, size_t pages) {
    if (!vm_populate(block, pages * page_bytes(governor))) {
        atomic_store_explicit(&governor->cannot_populate, true, memory_order_relaxed);
    }
}

void governor_put_large(struct governor *governor, void *block) {
    heap_lock(governor);
    struct span *moved = heap_put_large(&governor->heap, block);
    if (moved != NULL) {
        heap_unlock(governor);
        enum vm_renewed renewed = vm_renew(moved->base, (size_t)moved->pages * page_bytes(governor));
        heap_lock(governor);
        heap_put_renewed(&governor->heap, moved, renewed);
    }
    heap_unlock_and_check(governor);
}

void *governor_resize_large(struct governor *governor, struct span *span, size_t pages) {
    size_t held = span->pages;
    heap_lock(governor);
    bool resized = heap_resize_large(&governor->heap, span, pages);
    bool may_move = !resized && pages > held && held * page_bytes(governor) >= MIN_MOVE_BYTES &&
                    heap_may_move(&governor->heap);
    bool zero;
    char *to_base = may_move ? heap_take_large(&governor->heap, pages, 1, RUN_FOR_MOVE, false, &zero) : NULL;
    heap_unlock_and_check(governor);
    if (resized || to_base == NULL) {
        return resized ? span->base + span->offset : NULL;
    }
    size_t bytes = held * page_bytes(governor);
    if (!vm_move_pages(span->base, to_base, bytes)) {
        /* Older kernels may have unmapped the target before they failed. If it cannot be mapped anew, it is
         * lost. */
        if (vm_replace(to_base, bytes)) {
            governor_put_large(governor, to_base);
        }
        return NULL;
    }
    heap_lock(governor);
    struct span *to = heap_large_span(&governor->heap, to_base);
    heap_moved(&governor->heap, span, to);
    heap_unlock_and_check(governor);
    return to->base + to->offset;
}
