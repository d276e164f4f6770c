#include "arena/large.h"

#include "arena/check.h"
#include "arena/fault_cost.h"
#include "arena/limit.h"
#include "arena/select.h"
#include "base/assert.h"
#include "os/filters.h"
#include "os/hardware_caches.h"
#include "os/purge.h"
#include "os/random.h"
#include "os/vm.h"

/* Smaller blocks cost more to move than to copy (docs/experiments.md). */
#define MIN_MOVE_BYTES ((size_t)256 << 10)

/* A smaller block without evidence takes resident pages, since the faults in
 * clean pages would cost more. */
#define MIN_SPARSE_BYTES ((size_t)1 << 20)

/* Larger blocks without evidence may take resident pages, too, while such
 * blocks hold no more than this. A program that takes and frees one buffer
 * repeatedly then need not fault it in each time. */
#define MAX_GUESSED_BYTES ((size_t)4 << 20)

static bool may_guess(const struct arenas *arenas, const struct arena *arena, size_t pages) {
    return (arena->heap.guessed_pages + pages) * page_bytes(arenas) <= MAX_GUESSED_BYTES;
}

/* Returns whether the program may leave much of a block untouched. A control
 * block that the caller would clear tells nothing unless its pages are clean.
 * If a filter forbids asking the kernel which pages were touched, any pages
 * will do. */
static bool may_be_sparse(const struct arenas *arenas, size_t pages, bool zeroed,
                          enum thp_evidence evidence) {
    if (pages < THP_MIN_PAGES || !filters_allow_all()) {
        return false;
    }
    bool large = pages * page_bytes(arenas) >= MIN_SPARSE_BYTES;
    return (evidence == THP_NONE && (zeroed || large)) || (evidence == THP_CONTROL && zeroed && large);
}

/* The caller holds the heap's lock. */
static enum run_choice large_choose_run(const struct arenas *arenas, const struct arena *arena, size_t pages,
                                        bool sparse, enum thp_evidence evidence) {
    if (pages < THP_MIN_PAGES) {
        return RUN_FOR_ANY;
    }
    if (sparse && (evidence == THP_CONTROL || !may_guess(arenas, arena, pages))) {
        return RUN_FOR_SPARSE;
    }
    if (arena->heap.runs.region_pages == 0) {
        return RUN_FOR_ANY;
    }
    bool dense =
        evidence == THP_SURE && !thp_policy_is_costly(&arena->thp) && allows_region(arenas, arena, pages);
    return dense ? RUN_FOR_HUGE_PAGES : RUN_FOR_LARGE;
}

/* Returns whether large blocks are spread by their colors. When huge pages are
 * first requested, reads the description of the machine's caches. This costs
 * far less than the request. The caller holds the heap's lock. */
static bool prepare_colors(const struct arenas *arenas, struct arena *arena, enum run_choice choice) {
    struct heap *heap = &arena->heap;
    bool colored = setting_value(&arenas->settings.placement) == PLACEMENT_COLORS;
    if (!colored || arena->has_colors || (choice != RUN_FOR_HUGE_PAGES && heap->runs.regions == 0)) {
        return colored;
    }
    arena->has_colors = true;
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    /* Virtual addresses index the nearest cache. Placement by lines spreads
     * blocks over it. */
    size_t outer = 0;
    while (outer < count && caches[outer].level < 2) {
        outer++;
    }
    colors_init(&heap->colors, caches + outer, count - outer, page_bytes(arenas),
                heap->runs.region_pages * page_bytes(arenas), random_process_seed());
    return colored;
}

/* Purges those pages of a new block that will be sampled. The program does not
 * have the block yet. */
static void open_control(struct arenas *arenas, struct span *span) {
    struct iovec ranges[THP_SAMPLED_RANGES];
    size_t bytes = (size_t)span->pages * page_bytes(arenas);
    size_t count = thp_policy_sampled(span->base, bytes, page_bytes(arenas), ranges);
    struct purge_result result = purge_ranges(ranges, count);
    calm_assert(count > 0 && count <= THP_SAMPLED_RANGES && result.ranges_done <= count, count);
    span->fresh = result.ranges_done == count;
    add_count(&arenas->counts.ranges, result.ranges_done);
    add_count(&arenas->counts.vectored_calls, result.vectored_calls);
    add_count(&arenas->counts.single_calls, result.single_calls);
}

/* What an arena does if it has no dirty pages for a block that they could
 * serve. */
enum when_short {
    SHORT_GROWS,
    SHORT_REFERS, /* to another arena, if one is likely to have them */
    SHORT_REFUSES,
};

/* A request for a large block. */
struct large_request {
    size_t pages, align_pages;
    bool zeroed; /* the caller clears the block if it is not zero */
    enum when_short when_short;
    bool *zero;          /* whether the block is known to be zero */
    struct arena *other; /* the arena to which the request is referred */
};

static bool has_dirty(const struct arena *arena, const struct large_request *request) {
    return runs_have_dirty(&arena->heap.runs, request->pages + request->align_pages - 1);
}

/* Returns whether the arena is not to serve the request. The caller holds the
 * heap's lock. */
static bool is_short(const struct arenas *arenas, const struct arena *arena, struct large_request *request,
                     enum run_choice choice) {
    if (request->when_short == SHORT_REFUSES) {
        return choice == RUN_FOR_SPARSE || !has_dirty(arena, request);
    }
    if (request->when_short == SHORT_GROWS || choice == RUN_FOR_SPARSE || has_dirty(arena, request)) {
        return false;
    }
    request->other = takes_from_others(arenas, arena, request->pages)
                         ? arena_with(arenas, arena, request->pages, 0)
                         : NULL;
    return request->other != NULL;
}

static void *take_large_from(struct arenas *arenas, struct arena *arena, struct large_request *request) {
    size_t pages = request->pages;
    heap_lock(arena);
    enum thp_evidence evidence = pages < THP_MIN_PAGES ? THP_NONE : thp_policy_expect(&arena->thp, pages);
    bool sparse = may_be_sparse(arenas, pages, request->zeroed, evidence);
    enum run_choice choice = large_choose_run(arenas, arena, pages, sparse, evidence);
    if (is_short(arenas, arena, request, choice)) {
        heap_unlock(arena);
        return NULL;
    }
    uint64_t made = arena->heap.runs.huge_pages_made;
    bool colored = prepare_colors(arenas, arena, choice);
    char *block = heap_take_large(&arena->heap, pages, request->align_pages, choice, colored, request->zero);
    made = arena->heap.runs.huge_pages_made - made;
    struct span *span = block == NULL ? NULL : heap_large_span(&arena->heap, block);
    calm_assert(span == NULL ? block == NULL : span->pages == pages && span->base == block, pages);
    struct iovec sampled = {0};
    bool is_control = evidence == THP_CONTROL && span != NULL && !span->fresh && !span->huge &&
                      !request->zeroed && pages * page_bytes(arenas) >= MIN_SPARSE_BYTES;
    if (sparse && span != NULL && !span->fresh) {
        heap_note_guess(&arena->heap, span);
    }
    if (span != NULL && pages >= THP_MIN_PAGES) {
        sampled = thp_policy_note(&arena->thp, &arena->heap, span);
    }
    heap_unlock_and_check(arenas, arena);
    if (made > 0 && block != NULL) {
        prefault_huge_page(arenas, &arena->thp, block);
    }
    if (sampled.iov_len > 0) {
        thp_policy_sample(&arena->thp, sampled.iov_base, sampled.iov_len, page_bytes(arenas), false);
    }
    if (is_control) {
        open_control(arenas, span);
    }
    return block;
}

/* Another arena that has enough dirty pages may serve the request before the
 * thread's own one grows. */
void *arena_take_large(struct arenas *arenas, size_t pages, size_t align_pages, bool zeroed, bool *zero) {
    struct large_request request = {.pages = pages, .align_pages = align_pages, .zeroed = zeroed};
    request.zero = zero;
    request.when_short = arena_is_alone(arenas) ? SHORT_GROWS : SHORT_REFERS;
    struct arena *arena = arena_own(arenas);
    void *block = take_large_from(arenas, arena, &request);
    if (request.other != NULL) {
        request.when_short = SHORT_REFUSES;
        block = take_large_from(arenas, request.other, &request);
        request.when_short = SHORT_GROWS;
        block = block == NULL ? take_large_from(arenas, arena, &request) : block;
    }
    request.when_short = SHORT_GROWS;
    /* No part has room for a block that is longer than one. */
    bool fits = pages <= (size_t)1 << arenas->map.part_shift >> page_shift(arenas);
    unsigned number = fits ? 0 : arenas->map.parts;
    for (struct arena *next; block == NULL && (next = arena_instead(arenas, arena, &number)) != NULL;) {
        block = take_large_from(arenas, next, &request);
    }
    return block;
}

void arena_put_large(struct arenas *arenas, void *block) {
    struct arena *arena = arena_of(arenas, block);
    const struct span *span = heap_large_span(&arena->heap, block);
    if (span != NULL && thp_policy_samples_freed(&arena->thp, span)) {
        thp_policy_sample(&arena->thp, span->base, (size_t)span->pages * page_bytes(arenas),
                          page_bytes(arenas), true);
    }
    heap_lock(arena);
    arena->heap.freed_now = block;
    struct span *moved = heap_put_large(&arena->heap, block);
    arena->heap.freed_now = NULL;
    if (moved != NULL) {
        heap_unlock(arena);
        enum vm_renewed renewed = vm_renew(moved->base, (size_t)moved->pages * page_bytes(arenas));
        heap_lock(arena);
        heap_put_renewed(&arena->heap, moved, renewed);
    }
    heap_unlock_and_check(arenas, arena);
}

void *arena_resize_large(struct arenas *arenas, void *block, size_t pages) {
    struct arena *arena = arena_of(arenas, block);
    struct span *span = heap_large_span(&arena->heap, block);
    if (span == NULL) {
        return NULL;
    }
    size_t held = span->pages;
    heap_lock(arena);
    calm_assert(span->state == SPAN_LARGE && pages > 0, span->page, span->state);
    bool resized = heap_resize_large(&arena->heap, span, pages);
    bool may_move = !resized && pages > held && held * page_bytes(arenas) >= MIN_MOVE_BYTES &&
                    heap_may_move(&arena->heap) && vm_can_merge_replaced();
    bool zero;
    char *to_base = may_move ? heap_take_large(&arena->heap, pages, 1, RUN_FOR_MOVE, false, &zero) : NULL;
    heap_unlock_and_check(arenas, arena);
    if (resized || to_base == NULL) {
        return resized ? span->base + span->offset : NULL;
    }
    size_t bytes = held * page_bytes(arenas);
    if (!vm_move_pages(span->base, to_base, bytes)) {
        /* Older kernels may have unmapped the target before they failed. If the
         * target cannot be mapped again, it is lost. */
        if (vm_replace(to_base, bytes)) {
            arena_put_large(arenas, to_base);
        }
        return NULL;
    }
    heap_lock(arena);
    struct span *to = heap_large_span(&arena->heap, to_base);
    calm_assert(to != NULL && to->base == to_base, to_base);
    heap_moved(&arena->heap, span, to);
    heap_unlock_and_check(arenas, arena);
    return to->base + to->offset;
}
