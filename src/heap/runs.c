#include "heap/runs.h"

/* Each may cost two of the 65,530 mappings that a process may have. */
#define HUGE_REGIONS_MOST 8192

/* A run is extended for no less, and if it has at least this part of what is wanted. */
#define EXTENDED_PAGES_LEAST 32
#define EXTENDED_PART        4

#define LINEAR_BINS 7 /* one for each size below 8 pages, then eight to each doubling */

/* The bin of runs of so many pages. */
static unsigned bin_of(size_t pages) {
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
    span->state = clean ? SPAN_CLEAN : SPAN_DIRTY;
    struct run_set *set = set_of(runs, span);
    unsigned bin = bin_of(span->pages);
    address_order_insert(&set->bins[bin], span);
    set->filled[bin / 64] |= (uint64_t)1 << (bin % 64);
    set->pages += span->pages;
    if (!clean) {
        span_ages_append(&runs->dirty_ages, span);
    }
    space_mark_ends(runs->space, span);
}

void runs_remove(struct runs *runs, struct span *span) {
    struct run_set *set = set_of(runs, span);
    unsigned bin = bin_of(span->pages);
    address_order_remove(&set->bins[bin], span);
    if (set->bins[bin] == NULL) {
        set->filled[bin / 64] &= ~((uint64_t)1 << (bin % 64));
    }
    set->pages -= span->pages;
    if (span->state == SPAN_DIRTY) {
        span_ages_remove(&runs->dirty_ages, span);
    }
    span->state = SPAN_PURGING;
}

struct span *runs_behind(const struct runs *runs, const struct span *span) {
    uint32_t page = span->page + span->pages;
    struct span *next = space_span_of(runs->space, page);
    return is_free_run(next) && next->page == page ? next : NULL;
}

struct span *runs_put(struct runs *runs, struct span *span, bool clean) {
    enum span_state state = clean ? SPAN_CLEAN : SPAN_DIRTY;
    struct span *behind = runs_behind(runs, span);
    if (behind != NULL && behind->state == state && behind->huge == span->huge) {
        runs_remove(runs, behind);
        span->pages += behind->pages;
        space_drop_span(runs->space, behind);
    }
    struct span *before = space_span_of(runs->space, span->page - 1);
    if (before->state == state && before->huge == span->huge && before->page + before->pages == span->page) {
        runs_remove(runs, before);
        before->pages += span->pages;
        space_drop_span(runs->space, span);
        span = before;
    }
    insert(runs, span, clean);
    return span;
}

struct span *runs_split(struct runs *runs, struct span *span, size_t pages) {
    struct span *rest = space_take_span(runs->space);
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

/* A run that has so many pages: of the fitting bins the one of the smallest, there the lowest address. */
static struct span *find(const struct run_set *set, size_t pages) {
    if (set->pages < pages) {
        return NULL;
    }
    unsigned bin = bin_of(pages);
    /* In its own bin a run may be too short; only the lowest is tried. */
    if (set->bins[bin] != NULL && set->bins[bin]->pages >= pages) {
        return set->bins[bin];
    }
    bin++;
    for (unsigned word = bin / 64; word < RUN_BINS / 64; word++) {
        uint64_t filled = set->filled[word];
        if (word == bin / 64) {
            filled &= ~(uint64_t)0 << (bin % 64);
        }
        if (filled != 0) {
            return set->bins[word * 64 + (unsigned)__builtin_ctzll(filled)];
        }
    }
    return NULL;
}

/* Lets the last segment with usable pages go, if all of them are free, and those behind it. */
static bool drop_last_segment(struct runs *runs) {
    uint32_t end;
    uint32_t first = space_last(runs->space, &end);
    while (first != 0 && first == end) {
        space_drop_last(runs->space);
        first = space_last(runs->space, &end);
    }
    if (first == 0) {
        return false;
    }
    for (uint32_t page = first; page < end;) {
        const struct span *run = space_span_of(runs->space, page);
        if (!is_free_run(run) || run->page != page) {
            return false;
        }
        page += run->pages;
    }
    for (uint32_t page = first; page < end;) {
        struct span *run = space_span_of(runs->space, page);
        page += run->pages;
        runs_remove(runs, run);
        runs->huge_regions -= run->huge ? run->pages / runs->huge_pages : 0;
        space_drop_span(runs->space, run);
    }
    space_drop_last(runs->space);
    return true;
}

/* Where address space is short, segments that are free may be in the way of a longer one. */
static uint32_t extend_space(struct runs *runs, size_t pages, size_t *got) {
    uint32_t page = space_extend(runs->space, pages, got);
    while (page == 0 && drop_last_segment(runs)) {
        page = space_extend(runs->space, pages, got);
    }
    return page;
}

bool runs_extend(struct runs *runs, size_t pages) {
    struct span *span = space_take_span(runs->space);
    if (span == NULL) {
        return false;
    }
    size_t got;
    span->page = extend_space(runs, pages, &got);
    if (span->page == 0) {
        space_drop_span(runs->space, span);
        return false;
    }
    span->pages = (uint32_t)got;
    span->base = space_address(runs->space, span->page);
    runs_put(runs, span, true);
    return true;
}

size_t runs_whole_regions(const struct runs *runs, const struct span *span, size_t *before) {
    size_t unit = runs->huge_pages << runs->space->page_shift;
    size_t skip = (size_t)(-(uintptr_t)span->base & (unit - 1)) >> runs->space->page_shift;
    *before = skip;
    return skip >= span->pages ? 0 : (span->pages - skip) / runs->huge_pages * runs->huge_pages;
}

/* Makes the space usable that a choice would come to at last. */
static struct span *find_clean(struct runs *runs, size_t pages) {
    struct span *run = find(&runs->sets[RUN_CLEAN], pages);
    if (run == NULL && runs_extend(runs, pages)) {
        run = find(&runs->sets[RUN_CLEAN], pages);
    }
    return run;
}

/*
 * Whole huge regions for so many pages, as a dirty run in its set, with what lies beside it; NULL where there
 * can be none. Each new region costs a system call, and two mappings at worst.
 */
static struct span *make_huge(struct runs *runs, size_t pages) {
    size_t wanted = (pages + runs->huge_pages - 1) / runs->huge_pages * runs->huge_pages;
    struct span *run = find(&runs->sets[RUN_HUGE_CLEAN], wanted + runs->huge_pages - 1);
    bool known = run != NULL;
    if (!known) {
        if (runs->huge_regions + wanted / runs->huge_pages > HUGE_REGIONS_MOST) {
            return NULL;
        }
        run = find_clean(runs, wanted + runs->huge_pages - 1);
    }
    if (run == NULL) {
        return NULL;
    }
    size_t before;
    runs_whole_regions(runs, run, &before);
    runs_remove(runs, run);
    if (before > 0) {
        struct span *rest = runs_split(runs, run, before);
        insert(runs, run, true);
        if (rest == NULL) {
            return NULL;
        }
        run = rest;
    }
    if (run->pages > wanted) {
        struct span *rest = runs_split(runs, run, wanted);
        if (rest == NULL) {
            runs_put(runs, run, true);
            return NULL;
        }
        insert(runs, rest, true);
    }
    /* What was known is asked for again: it was given back in parts, perhaps. */
    if (!os_want_huge_pages(run->base, (size_t)run->pages << runs->space->page_shift)) {
        runs_put(runs, run, true);
        return NULL;
    }
    runs->huge_regions += known ? 0 : run->pages / runs->huge_pages;
    runs->faulted_pages += run->pages;
    run->huge = true;
    runs->huge_pages_made += run->pages;
    return runs_put(runs, run, false);
}

static struct span *find_dirty(struct runs *runs, size_t pages) {
    return find(&runs->sets[RUN_DIRTY], pages);
}

static struct span *find_huge(struct runs *runs, size_t pages) {
    return find(&runs->sets[RUN_HUGE_DIRTY], pages);
}

/* The clean run that ends where span begins, or begins where it ends; NULL if there is none. */
static struct span *clean_before(const struct runs *runs, const struct span *span) {
    struct span *before = space_span_of(runs->space, span->page - 1);
    return before->state == SPAN_CLEAN && !before->huge && before->page + before->pages == span->page ? before
                                                                                                      : NULL;
}

static struct span *clean_behind(const struct runs *runs, const struct span *span) {
    struct span *behind = runs_behind(runs, span);
    return behind != NULL && behind->state == SPAN_CLEAN && !behind->huge ? behind : NULL;
}

static size_t pages_of(const struct span *span) {
    return span == NULL ? 0 : span->pages;
}

/*
 * A dirty run that is too short, but long enough with the clean ones beside it: pages that are resident are
 * used, and fewer are faulted in. Of the longest, one of each bin is looked at.
 */
static struct span *find_extensible(const struct runs *runs, size_t pages) {
    const struct run_set *set = &runs->sets[RUN_DIRTY];
    if (set->pages + runs->sets[RUN_CLEAN].pages < pages) {
        return NULL; /* and pages may have no bin */
    }
    unsigned least = bin_of(pages / EXTENDED_PART > 0 ? pages / EXTENDED_PART : 1);
    for (unsigned bin = bin_of(pages) + 1; bin-- > least;) {
        struct span *run = set->bins[bin];
        if (run != NULL &&
            pages_of(clean_before(runs, run)) + run->pages + pages_of(clean_behind(runs, run)) >= pages) {
            return run;
        }
    }
    return NULL;
}

/* Takes so many pages at the start or at the end of a free run out of it. NULL if there is no descriptor. */
static struct span *cut(struct runs *runs, struct span *run, size_t pages, bool at_end) {
    runs_remove(runs, run);
    if (run->pages == pages) {
        return run;
    }
    struct span *rest = runs_split(runs, run, at_end ? run->pages - pages : pages);
    if (rest == NULL) {
        insert(runs, run, true);
        return NULL;
    }
    insert(runs, at_end ? run : rest, true);
    return at_end ? rest : run;
}

/* Makes a run as long as wanted, by the clean ones beside it. NULL if descriptors are short. */
static struct span *extend_run(struct runs *runs, struct span *run, size_t pages) {
    for (int at_end = 0; at_end < 2 && run->pages < pages; at_end++) {
        struct span *beside = at_end ? clean_before(runs, run) : clean_behind(runs, run);
        size_t wanted = pages - run->pages;
        size_t held = pages_of(beside);
        struct span *part = held == 0 ? NULL : cut(runs, beside, held < wanted ? held : wanted, at_end != 0);
        if (part != NULL) {
            runs->faulted_pages += part->pages;
            run = runs_put(runs, part, false);
        }
    }
    return run->pages >= pages ? run : NULL;
}

/* One in a huge region, where colors have room if that can be; all of them have, if colors is NULL. */
static struct span *find_colored(struct runs *runs, size_t pages, const struct colors *colors) {
    struct span *run = find_huge(runs, pages);
    if (run == NULL || colors == NULL ||
        colors_skip(colors, runs_address_page(runs, run), run->pages - pages) != COLORS_NO_ROOM) {
        return run;
    }
    return find_huge(runs, pages + colors_spare(colors));
}

/* The run to carve pages from. colors: of which one has room; or NULL. */
static struct span *find_any(struct runs *runs, size_t pages, enum run_choice choice,
                             const struct colors *colors) {
    struct span *run = NULL;
    if (choice == RUN_FOR_DENSE) {
        run = find_colored(runs, pages, colors);
    }
    if (run == NULL && choice != RUN_FOR_MOVE) {
        run = find_dirty(runs, pages);
    }
    if (run == NULL && choice != RUN_FOR_MOVE && pages >= EXTENDED_PAGES_LEAST) {
        run = find_extensible(runs, pages);
        run = run == NULL ? NULL : extend_run(runs, run, pages);
    }
    if (run == NULL && choice == RUN_FOR_DENSE) {
        run = make_huge(runs, pages + (colors == NULL ? 0 : colors_skip_in_huge_page(colors)));
    }
    if (run == NULL && choice == RUN_FOR_LARGE) {
        run = find_huge(runs, pages);
    }
    if (run == NULL) {
        run = find_clean(runs, pages);
    }
    /* Memory is short: whatever there is. */
    if (run == NULL) {
        run = find_dirty(runs, pages);
    }
    return run != NULL || choice == RUN_FOR_MOVE ? run : find_huge(runs, pages);
}

/* How many pages to leave out at a run's start. */
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
    /* What is aligned begins where it must, and where all colors are full none is better than another. */
    if (align_pages > 1 || (colors != NULL && colors_skip_in_huge_page(colors) == COLORS_NO_ROOM)) {
        colors = NULL;
    }
    struct span *run = find_any(runs, pages + align_pages - 1, choice, colors);
    if (run == NULL) {
        return NULL;
    }
    *clean = run->state == SPAN_CLEAN;
    runs_remove(runs, run);

    size_t skip = skip_of(runs, run, pages, align_pages, colors);
    if (skip > 0) {
        struct span *rest = runs_split(runs, run, skip);
        insert(runs, run, *clean);
        if (rest == NULL) {
            return NULL;
        }
        run = rest;
    }
    if (run->pages > pages) {
        struct span *rest = runs_split(runs, run, pages);
        if (rest == NULL) {
            runs_put(runs, run, *clean);
            return NULL;
        }
        insert(runs, rest, *clean);
    }
    space_mark_ends(runs->space, run);
    return run;
}
