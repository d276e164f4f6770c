#include "heap/runs.h"

#include "base/assert.h"

/* Each region may cost two of the 65,530 mappings that a process may have. */
#define MAX_REGIONS 8192

/* A run is extended only if at least MIN_EXTENDED_PAGES are requested, and if
 * the run has at least this part of them. */
#define MIN_EXTENDED_PAGES 32
#define EXTENDED_PART      4

#define MAX_CLEAN_TRIES    64
#define RETRACT_KEPT_BYTES ((size_t)8 << 20)

#define MIN_RELEASED_PAGES 8 /* two of the pages may become guards */

#define LINEAR_BINS 7 /* a bin for each size below 8 pages, then eight for each doubling */

/* Returns the bin of runs of this length. */
static unsigned bin_of(size_t pages) {
    calm_assert(pages > 0);
    if (pages <= LINEAR_BINS) {
        return (unsigned)pages - 1;
    }
    unsigned exponent = 63 - (unsigned)__builtin_clzll(pages);
    return LINEAR_BINS + (exponent - 3) * 8 + ((unsigned)(pages >> (exponent - 3)) & 7);
}

static struct run_set *set_of(struct runs *runs, const struct span *span) {
    return &runs->sets[(span->state == SPAN_CLEAN ? RUN_CLEAN : RUN_DIRTY) + (span->huge ? 2 : 0)];
}

static bool is_free_run(const struct span *span) {
    return span->state == SPAN_DIRTY || span->state == SPAN_CLEAN;
}

static void insert(struct runs *runs, struct span *span, bool clean) {
    calm_assert(!is_free_run(span) && span->pages > 0, span->page, span->state);
    span->state = clean ? SPAN_CLEAN : SPAN_DIRTY;
    struct run_set *set = set_of(runs, span);
    unsigned bin = bin_of(span->pages);
    address_order_insert(&set->bins[bin], span);
    set->filled[bin / 64] |= (uint64_t)1 << (bin % 64);
    set->pages += span->pages;
    if (!clean) {
        span->dirty_since = runs_now(runs);
        span_ages_append(&runs->dirty_ages, span);
    }
    space_mark_ends(runs->space, span);
}

/* Takes a free run out of its set. */
static void remove_run(struct runs *runs, struct span *span) {
    calm_assert(is_free_run(span), span->page, span->state);
    struct run_set *set = set_of(runs, span);
    unsigned bin = bin_of(span->pages);
    calm_assert(set->bins[bin] != NULL && set->pages >= span->pages, span->page, set->pages);
    calm_assert((set->filled[bin / 64] >> (bin % 64) & 1) != 0, bin);
    address_order_remove(&set->bins[bin], span);
    if (set->bins[bin] == NULL) {
        set->filled[bin / 64] &= ~((uint64_t)1 << (bin % 64));
    }
    set->pages -= span->pages;
    if (span->state == SPAN_DIRTY) {
        span_ages_remove(&runs->dirty_ages, span);
    }
    span->state = SPAN_TAKEN;
}

struct span *runs_next(const struct runs *runs, const struct span *span) {
    uint32_t page = span->page + span->pages;
    struct span *next = space_span_of(runs->space, page);
    return is_free_run(next) && next->page == page ? next : NULL;
}

/* Returns the free run that ends where the span begins, or NULL. */
static struct span *previous_run(const struct runs *runs, const struct span *span) {
    struct span *previous = space_span_of(runs->space, span->page - 1);
    return is_free_run(previous) && previous->page + previous->pages == span->page ? previous : NULL;
}

struct span *runs_put(struct runs *runs, struct span *span, bool clean) {
    calm_assert(span->state == SPAN_TAKEN || span->state == SPAN_UNUSED, span->page, span->state);
    enum span_state state = clean ? SPAN_CLEAN : SPAN_DIRTY;
    struct span *next = runs_next(runs, span);
    if (next != NULL && next->state == state && next->huge == span->huge) {
        remove_run(runs, next);
        span->pages += next->pages;
        span_table_drop(&runs->space->spans, next);
    }
    struct span *previous = previous_run(runs, span);
    if (previous != NULL && previous->state == state && previous->huge == span->huge) {
        remove_run(runs, previous);
        previous->pages += span->pages;
        span_table_drop(&runs->space->spans, span);
        span = previous;
    }
    insert(runs, span, clean);
    return span;
}

struct span *runs_split(struct runs *runs, struct span *span, size_t pages) {
    calm_assert(pages > 0 && pages < span->pages, pages, span->pages);
    struct span *rest = span_table_take(&runs->space->spans);
    if (rest == NULL) {
        return NULL;
    }
    rest->base = span->base + (pages << runs->space->page_shift);
    rest->page = span->page + (uint32_t)pages;
    rest->pages = span->pages - (uint32_t)pages;
    rest->state = span->state;
    rest->huge = span->huge;
    span->pages = (uint32_t)pages;
    return rest;
}

struct span *runs_carve(struct runs *runs, struct span *run, size_t skip, size_t pages) {
    calm_assert(is_free_run(run), run->page, run->state);
    calm_assert(pages > 0 && skip + pages <= run->pages, skip, pages, run->pages);
    bool clean = run->state == SPAN_CLEAN;
    struct span *taken = run;
    remove_run(runs, run);
    if (skip > 0) {
        taken = runs_split(runs, run, skip);
        insert(runs, run, clean);
    }
    if (taken != NULL && taken->pages > pages) {
        struct span *rest = runs_split(runs, taken, pages);
        if (rest == NULL) {
            runs_put(runs, taken, clean);
            return NULL;
        }
        insert(runs, rest, clean);
    }
    calm_assert(taken == NULL || (taken->pages == pages && taken->state == SPAN_TAKEN), pages);
    if (taken != NULL) {
        space_mark_ends(runs->space, taken);
    }
    return taken;
}

struct span *runs_carve_dirty(struct runs *runs, struct span *run, size_t skip, size_t pages) {
    calm_assert(run->state == SPAN_DIRTY, run->page, run->state);
    uint16_t since = run->dirty_since;
    struct span *taken = runs_carve(runs, run, skip, pages);
    if (taken == NULL) {
        remove_run(runs, run);
        return run;
    }
    if (skip > 0 && !run->huge) {
        span_ages_remove(&runs->dirty_ages, run);
        span_ages_prepend(&runs->dirty_ages, run);
        run->dirty_since = since;
    }
    return taken;
}

struct span *runs_some_clean(const struct runs *runs, uint32_t *number) {
    const struct span_table *spans = &runs->space->spans;
    for (int tries = 0; tries < MAX_CLEAN_TRIES; tries++) {
        *number = *number < spans->end ? *number : 0;
        struct span *span = span_at(spans, (*number)++);
        if (span->state == SPAN_CLEAN) {
            return span;
        }
    }
    return NULL;
}

/* Returns a run of at least this number of pages: the one of the lowest address
 * in the smallest bin that fits. Returns NULL if there is none. */
static struct span *runs_find(const struct run_set *set, size_t pages) {
    if (set->pages < pages) {
        return NULL;
    }
    unsigned bin = bin_of(pages);
    /* A run in the bin of this size may be too short. Only the run of the
     * lowest address is tried. */
    if (set->bins[bin] != NULL && set->bins[bin]->pages >= pages) {
        return set->bins[bin];
    }
    bin++;
    for (unsigned word = bin / 64; word < RUN_BINS / 64; word++) {
        uint64_t filled = set->filled[word] & (~(uint64_t)0 << (word == bin / 64 ? bin % 64 : 0));
        if (filled != 0) {
            calm_assert(set->bins[word * 64 + (unsigned)__builtin_ctzll(filled)]->pages >= pages, word,
                        pages);
            return set->bins[word * 64 + (unsigned)__builtin_ctzll(filled)];
        }
    }
    return NULL;
}

bool runs_have_dirty(const struct runs *runs, size_t pages) {
    return runs_find(&runs->sets[RUN_DIRTY], pages) != NULL;
}

static bool release_run(struct runs *runs, struct span *run) {
    calm_assert(run->state == SPAN_TAKEN, run->page, run->state);
    if (!space_release(runs->space, run->page, run->pages)) {
        return false;
    }
    calm_assert(!run->huge || runs->regions >= run->pages / runs->region_pages, runs->regions);
    runs->regions -= run->huge ? run->pages / runs->region_pages : 0;
    span_table_drop(&runs->space->spans, run);
    return true;
}

/* Releases the runs of one set that can be released, the longest first. Returns
 * the number of pages released. */
static size_t release_set(struct runs *runs, enum run_kind kind) {
    struct run_set *set = &runs->sets[kind];
    struct span *kept = NULL;
    size_t pages = set->pages;
    for (unsigned bin = RUN_BINS; bin-- > bin_of(MIN_RELEASED_PAGES);) {
        while (set->bins[bin] != NULL) {
            struct span *run = set->bins[bin];
            remove_run(runs, run);
            if (!release_run(runs, run)) {
                run->next = kept;
                kept = run;
            }
        }
    }
    while (kept != NULL) {
        struct span *run = kept;
        kept = run->next;
        insert(runs, run, kind == RUN_CLEAN || kind == RUN_HUGE_CLEAN);
    }
    return pages - set->pages;
}

/* Releases free segments shorter than MIN_RELEASED_PAGES. Such a segment is
 * what remained of a longer one around pages in use. */
static size_t release_short(struct runs *runs) {
    size_t released = 0;
    for (size_t number = 0; number < MAX_SEGMENTS; number++) {
        uint32_t end;
        uint32_t first = space_segment(runs->space, number, &end);
        struct span *run = space_span_of(runs->space, first);
        size_t pages = first == 0 ? 0 : end - first;
        if (pages > 0 && pages < MIN_RELEASED_PAGES && is_free_run(run) && run->pages == pages) {
            bool clean = run->state == SPAN_CLEAN;
            remove_run(runs, run);
            if (release_run(runs, run)) {
                released += pages;
            } else {
                insert(runs, run, clean);
            }
        }
    }
    return released;
}

size_t runs_release(struct runs *runs, bool dirty) {
    if (!runs->space->limited) {
        return 0;
    }
    size_t released = release_set(runs, RUN_CLEAN) + release_set(runs, RUN_HUGE_CLEAN);
    if (dirty) {
        released += release_set(runs, RUN_DIRTY) + release_set(runs, RUN_HUGE_DIRTY);
    }
    return released + release_short(runs);
}

/* Extends the space. If address space is short, first releases free runs to
 * make room. */
static uint32_t extend_space(struct runs *runs, size_t pages, size_t *extended) {
    uint32_t page = space_extend(runs->space, pages, extended);
    for (int dirty = false; page == 0 && dirty <= true; dirty++) {
        page = runs_release(runs, dirty) > 0 ? space_extend(runs->space, pages, extended) : 0;
    }
    return page;
}

/* Turns the whole huge-page regions of a purged run into ordinary pages, if
 * they have at least this number of pages. Returns the run that contains these
 * pages, or NULL. The run is dirty if the pages could not be renewed. */
static struct span *dissolve_run(struct runs *runs, struct span *run, size_t pages) {
    size_t skip = 0;
    size_t whole = run == NULL ? 0 : runs_whole_regions(runs, run, &skip);
    run = whole < pages || whole == 0 ? NULL : runs_carve(runs, run, skip, whole);
    if (run == NULL) {
        return NULL;
    }
    calm_assert(run->huge && run->pages == whole && whole % runs->region_pages == 0, run->pages, whole);
    enum vm_renewed renewed = vm_renew(run->base, whole << runs->space->page_shift);
    if (renewed == VM_UNUSABLE) {
        run->state = SPAN_LOST;
        return NULL;
    }
    run->huge = false;
    runs->regions -= size_min(runs->regions, whole / runs->region_pages);
    return runs_put(runs, run, renewed == VM_RENEWED);
}

static struct span *dissolve_regions(struct runs *runs, size_t pages) {
    return dissolve_run(runs, runs_find(&runs->sets[RUN_HUGE_CLEAN], pages), pages);
}

void runs_retract(struct runs *runs) {
    while (dissolve_regions(runs, size_max(runs->region_pages, 1)) != NULL) {
    }
    uint32_t end = space_end(runs->space);
    struct span *run = end == 0 ? NULL : space_span_of(runs->space, end - 1);
    size_t kept = RETRACT_KEPT_BYTES >> runs->space->page_shift;
    if (run == NULL || run->state != SPAN_CLEAN || run->huge || run->page + run->pages != end ||
        run->pages < 2 * kept) {
        return;
    }
    struct span *rest = runs_carve(runs, run, kept, run->pages - kept);
    if (rest == NULL) {
        return;
    }
    if (space_retract(runs->space, rest->page)) {
        span_table_drop(&runs->space->spans, rest);
    } else {
        runs_put(runs, rest, true);
    }
}

struct span *runs_extend(struct runs *runs, size_t pages) {
    struct span *span = span_table_take(&runs->space->spans);
    if (span == NULL) {
        return NULL;
    }
    size_t extended;
    span->page = extend_space(runs, pages, &extended);
    if (span->page == 0) {
        span_table_drop(&runs->space->spans, span);
        return NULL;
    }
    span->pages = (uint32_t)extended;
    calm_assert(extended >= pages, extended, pages);
    span->base = space_address(runs->space, span->page);
    return runs_put(runs, span, true);
}

size_t runs_whole_regions(const struct runs *runs, const struct span *span, size_t *skip) {
    calm_assert(runs->region_pages > 0 && runs->region_pages << runs->space->page_shift != 0);
    size_t unit = runs->region_pages << runs->space->page_shift;
    *skip = (size_t)(-(uintptr_t)span->base & (unit - 1)) >> runs->space->page_shift;
    return *skip >= span->pages ? 0 : (span->pages - *skip) / runs->region_pages * runs->region_pages;
}

bool runs_put_as_regions(struct runs *runs, struct span *span) {
    calm_assert(span->state == SPAN_TAKEN && !span->huge, span->page, span->state);
    size_t skip;
    size_t whole = runs_whole_regions(runs, span, &skip);
    if (whole == 0) {
        runs_put(runs, span, false);
        return true;
    }
    if (runs->regions + whole / runs->region_pages > MAX_REGIONS) {
        return false;
    }
    struct span *regions = skip == 0 ? span : runs_split(runs, span, skip);
    if (regions == NULL) {
        return false;
    }
    struct span *rest = regions->pages == whole ? NULL : runs_split(runs, regions, whole);
    if (rest != NULL) {
        runs_put(runs, rest, false);
    }
    runs->regions += regions->pages / runs->region_pages;
    regions->huge = true;
    runs_put(runs, regions, false);
    if (regions != span) {
        runs_put(runs, span, false);
    }
    return true;
}

/* Returns a clean run, or NULL if memory is short. Makes more of the space
 * usable only if no run fits. Otherwise the heap would take more and more
 * address space. */
static struct span *find_clean(struct runs *runs, size_t pages) {
    struct span *run = runs_find(&runs->sets[RUN_CLEAN], pages);
    if (run == NULL) {
        run = dissolve_regions(runs, pages);
    }
    /* The new run is returned without a search, since a shorter run of its bin
     * may have a lower address. */
    if (run == NULL) {
        run = runs_extend(runs, pages);
    }
    return run == NULL || run->state == SPAN_CLEAN ? run : NULL;
}

/*
 * Makes whole huge-page regions of at least this number of pages. Returns the
 * dirty run that contains them, in its set, or NULL if that is impossible. Each
 * new region costs a system call, and two mappings at worst.
 */
static struct span *make_regions(struct runs *runs, size_t pages) {
    size_t wanted = (pages + runs->region_pages - 1) / runs->region_pages * runs->region_pages;
    struct span *run = runs_find(&runs->sets[RUN_HUGE_CLEAN], wanted + runs->region_pages - 1);
    bool known = run != NULL;
    if (!known && runs->regions + wanted / runs->region_pages <= MAX_REGIONS) {
        run = find_clean(runs, wanted + runs->region_pages - 1);
    }
    if (run == NULL) {
        return NULL;
    }
    size_t skip;
    runs_whole_regions(runs, run, &skip);
    run = runs_carve(runs, run, skip, wanted);
    if (run == NULL) {
        return NULL;
    }
    calm_assert(run->pages == wanted && run->state == SPAN_TAKEN, run->pages, wanted);
    /* The kernel is asked again for huge pages in a known region, since parts
     * of the region may have been purged. */
    if (!vm_enable_huge_pages(run->base, (size_t)run->pages << runs->space->page_shift)) {
        runs_put(runs, run, true);
        return NULL;
    }
    runs->regions += known ? 0 : run->pages / runs->region_pages;
    runs->faulted_pages += run->pages;
    run->huge = true;
    runs->huge_pages_made += run->pages;
    return runs_put(runs, run, false);
}

/* Returns the neighbour if a dirty run may be extended by it, else NULL. */
static struct span *if_clean(struct span *run) {
    return run != NULL && run->state == SPAN_CLEAN && !run->huge ? run : NULL;
}

static size_t pages_of(const struct span *span) {
    return span == NULL ? 0 : span->pages;
}

/*
 * Returns a dirty run that is too short, but long enough together with the
 * clean runs next to it. Its resident pages are used, so fewer pages fault. The
 * search tries one run of each bin, the bin of the longest runs first.
 */
static struct span *find_extensible(const struct runs *runs, size_t pages) {
    const struct run_set *set = &runs->sets[RUN_DIRTY];
    if (set->pages + runs->sets[RUN_CLEAN].pages < pages) {
        return NULL; /* there may be no bin for this number of pages */
    }
    unsigned min_bin = bin_of(pages / EXTENDED_PART > 0 ? pages / EXTENDED_PART : 1);
    for (unsigned bin = bin_of(pages) + 1; bin-- > min_bin;) {
        struct span *run = set->bins[bin];
        if (run != NULL && pages_of(if_clean(previous_run(runs, run))) + run->pages +
                                   pages_of(if_clean(runs_next(runs, run))) >=
                               pages) {
            return run;
        }
    }
    return NULL;
}

/* Extends a run to this number of pages by the clean runs next to it. Returns
 * NULL if descriptors are short. */
static struct span *extend_run(struct runs *runs, struct span *run, size_t pages) {
    for (int at_front = 0; at_front < 2 && run->pages < pages; at_front++) {
        struct span *next_to = if_clean(at_front ? previous_run(runs, run) : runs_next(runs, run));
        calm_assert(run->state == SPAN_DIRTY && !run->huge, run->page, run->state);
        size_t held = pages_of(next_to);
        size_t wanted = pages - run->pages < held ? pages - run->pages : held;
        struct span *part =
            held == 0 ? NULL : runs_carve(runs, next_to, at_front ? held - wanted : 0, wanted);
        if (part != NULL) {
            runs->faulted_pages += part->pages;
            run = runs_put(runs, part, false);
        }
    }
    return run->pages >= pages ? run : NULL;
}

/* Returns a run in a huge-page region in which a color has room, or NULL. If
 * `colors` is NULL, any run in a region will do. */
static struct span *find_colored(struct runs *runs, size_t pages, const struct colors *colors) {
    struct span *run = runs_find(&runs->sets[RUN_HUGE_DIRTY], pages);
    if (run == NULL || colors == NULL ||
        colors_skip(colors, runs_address_page(runs, run), run->pages - pages) != COLORS_NO_ROOM) {
        return run;
    }
    return runs_find(&runs->sets[RUN_HUGE_DIRTY], pages + colors_spare(colors));
}

/* Returns the run to carve the pages from. `colors` is NULL, or one of its
 * colors has room. */
static struct span *find_any(struct runs *runs, size_t pages, enum run_choice choice,
                             const struct colors *colors) {
    struct span *run = NULL;
    if (choice == RUN_FOR_HUGE_PAGES) {
        run = find_colored(runs, pages, colors);
    }
    if (choice == RUN_FOR_SPARSE) {
        run = find_clean(runs, pages);
    }
    if (run == NULL && choice != RUN_FOR_MOVE) {
        run = runs_find(&runs->sets[RUN_DIRTY], pages);
    }
    if (run == NULL && choice != RUN_FOR_MOVE && pages >= MIN_EXTENDED_PAGES) {
        run = find_extensible(runs, pages);
        run = run == NULL ? NULL : extend_run(runs, run, pages);
    }
    if (run == NULL && choice == RUN_FOR_HUGE_PAGES) {
        run = make_regions(runs, pages + (colors == NULL ? 0 : colors_skip_in_huge_page(colors)));
    }
    if (run == NULL && (choice == RUN_FOR_LARGE || choice == RUN_FOR_SPARSE)) {
        run = runs_find(&runs->sets[RUN_HUGE_DIRTY], pages);
    }
    if (run == NULL) {
        run = find_clean(runs, pages);
    }
    /* Memory is short: any run will do. */
    if (run == NULL) {
        run = runs_find(&runs->sets[RUN_DIRTY], pages);
    }
    return run != NULL || choice == RUN_FOR_MOVE ? run : runs_find(&runs->sets[RUN_HUGE_DIRTY], pages);
}

/* Returns the number of pages to skip at the start of a run. */
static size_t skip_of(const struct runs *runs, const struct span *run, size_t pages, size_t align_pages,
                      const struct colors *colors) {
    if (colors != NULL && run->huge) {
        size_t skip = colors_skip(colors, runs_address_page(runs, run), run->pages - pages);
        return skip == COLORS_NO_ROOM ? 0 : skip;
    }
    size_t unit = align_pages << runs->space->page_shift;
    return (size_t)(-(uintptr_t)run->base & (unit - 1)) >> runs->space->page_shift;
}

struct span *runs_take(struct runs *runs, size_t pages, size_t align_pages, enum run_choice choice,
                       const struct colors *colors, bool *clean) {
    calm_assert(pages > 0 && align_pages > 0 && (align_pages & (align_pages - 1)) == 0, pages, align_pages);
    /* The alignment determines where an aligned span starts. If all colors are
     * full, no start is better than another. */
    if (align_pages > 1 || (colors != NULL && colors_skip_in_huge_page(colors) == COLORS_NO_ROOM)) {
        colors = NULL;
    }
    struct span *run = find_any(runs, pages + align_pages - 1, choice, colors);
    if (run == NULL) {
        return NULL;
    }
    calm_assert(is_free_run(run) && run->pages >= pages + align_pages - 1, run->page, run->pages, pages);
    *clean = run->state == SPAN_CLEAN;
    return runs_carve(runs, run, skip_of(runs, run, pages, align_pages, colors), pages);
}
