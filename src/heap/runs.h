/*
 * Free runs of pages, in sets by two properties, in which runs that are joined agree: dirty runs, which may
 * be resident, and clean ones, which are zero and hold no memory; those in huge-page regions, and the others.
 *
 * Best fit by size, then the lowest address, so that free runs stay long; where no dirty run is long enough,
 * one that is together with the clean runs next to it. Single-owner.
 *
 * Huge-page regions are ranges, aligned to a huge page, that the kernel was asked to back by huge pages. As
 * soon as a part of a region is taken, all of it counts as dirty, since one touch makes all of it resident:
 * so the bound on free memory holds for them too.
 */
#ifndef CALM_HEAP_RUNS_H
#define CALM_HEAP_RUNS_H

#include "heap/space.h"
#include "placement/colors.h"

#define RUN_BINS 256

struct run_set {
    size_t pages;
    uint64_t filled[RUN_BINS / 64]; /* bit b: bin b is not empty */
    struct span *bins[RUN_BINS];
};

enum run_kind { RUN_DIRTY, RUN_CLEAN, RUN_HUGE_DIRTY, RUN_HUGE_CLEAN, RUN_KINDS };

struct runs {
    struct space *space;
    struct span_ages dirty_ages; /* of both kinds of dirty runs */
    size_t faulted_pages; /* that were clean, and are in use or dirty since: their next touch is a fault */
    size_t region_pages;  /* of a huge-page region; 0, as until the owner sets it: none are made */
    size_t regions;       /* asked for so far */
    uint64_t huge_pages_made; /* pages of regions, counted as dirty before they were in use */
    struct run_set sets[RUN_KINDS];
};

/* Where a taker wants its pages, first choice first. */
enum run_choice {
    RUN_FOR_ANY,        /* resident, else clean */
    RUN_FOR_LARGE,      /* the same, and in huge-page regions if nothing else is resident */
    RUN_FOR_SPARSE,     /* clean, else as RUN_FOR_LARGE: much of it may never be touched */
    RUN_FOR_HUGE_PAGES, /* in huge-page regions, else as RUN_FOR_LARGE; may make a region */
    RUN_FOR_MOVE,       /* clean, and not in a region: other pages will be moved there */
};

/*
 * A span of so many pages, of state SPAN_TAKEN, whose first page's address is a multiple of align_pages
 * pages. *clean says whether it is known to be zero. In a huge-page region it begins where colors have room;
 * NULL: anywhere. NULL if memory is short.
 */
struct span *runs_take(struct runs *runs, size_t pages, size_t align_pages, enum run_choice choice,
                       const struct colors *colors, bool *clean);

/* Puts a span into a set, which may merge it: from then on its descriptor is the set's. Returns the run that
 * it is, or is part of. */
struct span *runs_put(struct runs *runs, struct span *span, bool clean);

/* The same for a dirty span for whose whole huge pages the program requested them: these become huge-page
 * regions. False, and the span is the caller's still, if there can be no more of those. */
bool runs_put_as_regions(struct runs *runs, struct span *span);

/* Takes the pages after the first skip out of a free run; the rest of it stays free. The state of what is
 * taken is SPAN_TAKEN. NULL, and the run stays free, if there is no descriptor. */
struct span *runs_carve(struct runs *runs, struct span *run, size_t skip, size_t pages);

/* The same for a purge, of a dirty run: the pages before those stay as cold as the run was. All of it without
 * descriptors. */
struct span *runs_carve_dirty(struct runs *runs, struct span *run, size_t skip, size_t pages);

/* A clean run of a descriptor from *number on, which becomes the next one's; NULL if none of the next few is
 * one. */
struct span *runs_some_clean(const struct runs *runs, uint32_t *number);

/* Splits: span keeps the first pages, and the rest is returned with the same state and flags, in no set. NULL
 * if there is no descriptor. */
struct span *runs_split(struct runs *runs, struct span *span, size_t pages);

/* The address of a span, in pages: in a huge-page region, congruent to its physical address. */
static inline uint64_t runs_address_page(const struct runs *runs, const struct span *span) {
    return (uint64_t)(uintptr_t)span->base >> runs->space->page_shift;
}

/* The free run that begins where span ends, or NULL. */
struct span *runs_next(const struct runs *runs, const struct span *span);

/* Where address space is limited, releases the clean runs of some length, and the dirty ones if asked.
 * Returns how many pages. */
size_t runs_release(struct runs *runs, bool dirty);

/* Makes the clean pages at the space's end reserved ones again, but for a few: what is usable is written to
 * core files by debuggers, and charged to a process where the kernel does not overcommit. */
void runs_retract(struct runs *runs);

/* Makes so many pages more of the space usable. Returns the clean run that they are part of, or NULL. */
struct span *runs_extend(struct runs *runs, size_t pages);

/* The whole huge-page regions of a run: how many pages precede the first, and how many they have. */
size_t runs_whole_regions(const struct runs *runs, const struct span *span, size_t *skip);

#endif
