#include "governor/large.h"

#include "base/assert.h"
#include "governor/check.h"
#include "governor/fault_cost.h"
#include "governor/limit.h"
#include "os/filters.h"
#include "os/hardware_caches.h"
#include "os/purge.h"
#include "os/random.h"
#include "os/vm.h"

/* Smaller blocks cost more to move than to copy: see docs/experiments.md. */
#define MIN_MOVE_BYTES ((size_t)256 << 10)

/* A smaller block without evidence takes what is resident: memory that is not would cost it more than that.
 */
#define MIN_SPARSE_BYTES ((size_t)1 << 20)

/* And so may larger ones, while no more than that is in use of them: a program that takes and frees a buffer
 * again and again need not fault it in each time. */
#define MAX_GUESSED_BYTES ((size_t)4 << 20)

static bool may_guess(const struct governor *governor, size_t pages) {
    return (governor->heap.guessed_pages + pages) * page_bytes(governor) <= MAX_GUESSED_BYTES;
}

/* Whether much of a block may never be touched. A control that the caller would clear tells nothing unless it
 * is clean. Where the kernel cannot be asked what was touched, any memory will do. */
static bool may_be_sparse(const struct governor *governor, size_t pages, bool zeroed,
                          enum thp_evidence evidence) {
    if (pages < THP_MIN_PAGES || !filters_allow_all()) {
        return false;
    }
    bool large = pages * page_bytes(governor) >= MIN_SPARSE_BYTES;
    return (evidence == THP_NONE && (zeroed || large)) || (evidence == THP_CONTROL && zeroed && large);
}

/* Under the heap's lock. */
static enum run_choice large_choose_run(const struct governor *governor, size_t pages, bool sparse,
                                        enum thp_evidence evidence) {
    if (pages < THP_MIN_PAGES) {
        return RUN_FOR_ANY;
    }
    if (sparse && (evidence == THP_CONTROL || !may_guess(governor, pages))) {
        return RUN_FOR_SPARSE;
    }
    if (governor->heap.runs.region_pages == 0) {
        return RUN_FOR_ANY;
    }
    bool dense =
        evidence == THP_SURE && !thp_policy_is_costly(&governor->thp) && allows_region(governor, pages);
    return dense ? RUN_FOR_HUGE_PAGES : RUN_FOR_LARGE;
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

/* Purges what will be sampled of a new block, which its owner does not have yet. */
static void open_control(struct governor *governor, struct span *span) {
    struct iovec ranges[THP_SAMPLED_RANGES];
    size_t bytes = (size_t)span->pages * page_bytes(governor);
    size_t count = thp_policy_sampled(span->base, bytes, page_bytes(governor), ranges);
    struct purge_result result = purge_ranges(ranges, count);
    calm_assert(count > 0 && count <= THP_SAMPLED_RANGES && result.ranges_done <= count, count);
    span->fresh = result.ranges_done == count;
    heap_lock(governor);
    governor->counts.ranges += result.ranges_done;
    governor->counts.vectored_calls += result.vectored_calls;
    governor->counts.single_calls += result.single_calls;
    heap_unlock(governor);
}

void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool zeroed,
                          bool prefaults, bool *zero) {
    heap_lock(governor);
    enum thp_evidence evidence = pages < THP_MIN_PAGES ? THP_NONE : thp_policy_expect(&governor->thp, pages);
    bool sparse = may_be_sparse(governor, pages, zeroed, evidence);
    enum run_choice choice = large_choose_run(governor, pages, sparse, evidence);
    uint64_t made = governor->heap.runs.huge_pages_made;
    bool colored = prepare_colors(governor, choice);
    char *block = heap_take_large(&governor->heap, pages, align_pages, choice, colored, zero);
    made = governor->heap.runs.huge_pages_made - made;
    struct span *span = heap_large_span(&governor->heap, block);
    calm_assert(span == NULL ? block == NULL : span->pages == pages && span->base == block, pages);
    struct iovec sampled = {0};
    prefaults = prefaults && span != NULL && span->fresh && evidence >= THP_TOUCHED;
    bool is_control = evidence == THP_CONTROL && span != NULL && !span->fresh && !span->huge && !zeroed &&
                      pages * page_bytes(governor) >= MIN_SPARSE_BYTES;
    if (sparse && span != NULL && !span->fresh) {
        heap_note_guess(&governor->heap, span);
    }
    if (prefaults) {
        span->fresh = false;
    } else if (span != NULL && pages >= THP_MIN_PAGES) {
        sampled = thp_policy_note(&governor->thp, &governor->heap, span);
    }
    heap_unlock_and_check(governor);
    if (made > 0 && block != NULL) {
        touch_huge_page(governor, block);
    }
    if (sampled.iov_len > 0) {
        thp_policy_sample(&governor->thp, sampled.iov_base, sampled.iov_len, page_bytes(governor), false);
    }
    if (is_control) {
        open_control(governor, span);
    }
    if (prefaults) {
        vm_populate(block, pages * page_bytes(governor));
    }
    return block;
}

void governor_put_large(struct governor *governor, void *block) {
    const struct span *span = heap_large_span(&governor->heap, block);
    if (span != NULL && thp_policy_samples_freed(&governor->thp, span)) {
        thp_policy_sample(&governor->thp, span->base, (size_t)span->pages * page_bytes(governor),
                          page_bytes(governor), true);
    }
    heap_lock(governor);
    governor->heap.freed_now = governor->has_clients ? NULL : block;
    struct span *moved = heap_put_large(&governor->heap, block);
    governor->heap.freed_now = NULL;
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
    calm_assert(span->state == SPAN_LARGE && pages > 0, span->page, span->state);
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
    calm_assert(to != NULL && to->base == to_base, to_base);
    heap_moved(&governor->heap, span, to);
    heap_unlock_and_check(governor);
    return to->base + to->offset;
}
