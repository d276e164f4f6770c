/*
 * Free runs of pages, in sets by two properties that neighbours must share to be joined: the dirty, which may
 * be resident, and the clean, which are zero and hold no memory; and those in huge regions, and the others.
 *
 * Best fit by size, then the lowest address, so that free runs stay long; where no dirty run is long enough,
 * one that is with the clean ones beside it. Single-owner.
 *
 * Huge regions are ranges, aligned to a huge page, that the kernel was asked to back by huge pages. They are
 * for large blocks alone, of a program that was seen to touch its large blocks. As soon as a part of a region
 * is handed out, all of it counts as dirty, since one touch makes all of it resident: so the bound on free
 * memory holds for them too.
 */
#ifndef CALM_HEAP_RUNS_H
#define CALM_HEAP_RUNS_H

#include "heap/space.h"
#include "placement/colors.h"

#define RUN_BINS 256

struct run_set {
    struct span *bins[RUN_BINS];
    uint64_t filled[RUN_BINS / 64]; /* bit b: bin b is not empty */
    size_t pages;
};

enum run_kind { RUN_DIRTY, RUN_CLEAN, RUN_HUGE_DIRTY, RUN_HUGE_CLEAN, RUN_KINDS };

struct runs {
    struct space *space;
    struct run_set sets[RUN_KINDS];
    struct span_ages dirty_ages; /* of both kinds of dirty runs */
    size_t faulted_pages; /* that were clean, and are in use or dirty since: their next touch is a fault */
    size_t huge_pages;    /* in a huge region; 0: no huge pages are to be had */
    size_t huge_regions;  /* asked for so far */
    uint64_t huge_pages_made; /* counted as dirty before anybody had them */
};

/* What a taker would have, first choice first. */
enum run_choice {
    RUN_FOR_ANY,   /* resident, else clean */
    RUN_FOR_LARGE, /* the same, and in huge regions where nothing else is resident */
    RUN_FOR_DENSE, /* in huge regions, else as RUN_FOR_LARGE; may make a huge region */
    RUN_FOR_MOVE,  /* clean, and not in a huge region: other pages will be put there */
};

static inline size_t runs_dirty_pages(const struct runs *runs) {
    return runs->sets[RUN_DIRTY].pages + runs->sets[RUN_HUGE_DIRTY].pages;
}

/*
 * A span of so many pages, of state SPAN_PURGING, whose first page's address is a multiple of align_pages
 * pages. *clean says whether it is known to be zero. In a huge region it begins where colors have room; NULL:
 * no matter where. NULL if memory is short.
 */
struct span *runs_take(struct runs *runs, size_t pages, size_t align_pages, enum run_choice choice,
                       const struct colors *colors, bool *clean);

/* Puts a span, described by nobody else, into a set. It may be merged: the descriptor is the set's from then
 * on. Returns the run that it is, or is part of. */
struct span *runs_put(struct runs *runs, struct span *span, bool clean);

/* Takes a free run out of its set; its state becomes SPAN_PURGING. */
void runs_remove(struct runs *runs, struct span *span);

/* The address of a span, in pages: in huge memory, as far from a huge page's start as its page is. */
static inline uint64_t runs_address_page(const struct runs *runs, const struct span *span) {
    return (uint64_t)(uintptr_t)span->base >> runs->space->page_shift;
}

/* Splits: span keeps the first pages, and the rest is returned with the same state and flags, in no set. NULL
 * if there is no descriptor. */
struct span *runs_split(struct runs *runs, struct span *span, size_t pages);

/* The free run that begins right behind span, or NULL. */
struct span *runs_behind(const struct runs *runs, const struct span *span);

/* Makes more of the space usable, as a clean run. */
bool runs_extend(struct runs *runs, size_t pages);

/* The whole huge regions of a run: how many pages lie before the first, and how many they have. */
size_t runs_whole_regions(const struct runs *runs, const struct span *span, size_t *before);

#endif
