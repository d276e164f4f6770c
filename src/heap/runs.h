/*
 * Free runs of pages: the dirty, which may be resident, and the clean, which are zero and hold no memory,
 * apart. Best fit by size, then the lowest address, so that free runs stay long; a run joins its free
 * neighbours of the same kind. Single-owner.
 */
#ifndef CALM_HEAP_RUNS_H
#define CALM_HEAP_RUNS_H

#include "heap/space.h"

#define RUN_BINS 256

struct run_set {
    struct span *bins[RUN_BINS];
    uint64_t filled[RUN_BINS / 64]; /* bit b: bin b is not empty */
    size_t pages;
};

struct runs {
    struct space *space;
    struct run_set dirty;
    struct run_set clean;
    struct span_ages dirty_ages;
    size_t reused_pages; /* taken from clean runs that held memory before: given back, and wanted again */
};

/*
 * A span of so many pages, of state SPAN_PURGING, whose first page's address is a multiple of align_pages
 * pages. *clean says whether it is known to be zero. With prefer_clean, dirty runs are the second choice.
 * NULL if memory is short.
 */
struct span *runs_take(struct runs *runs, size_t pages, size_t align_pages, bool prefer_clean, bool *clean);

/* Puts a span, described by nobody else, into a set. It may be merged: the descriptor is the set's from then
 * on. */
void runs_put(struct runs *runs, struct span *span, bool clean);

/* Takes a free run out of its set; its state becomes SPAN_PURGING. */
void runs_remove(struct runs *runs, struct span *span);

/* Splits: span keeps the first pages, and the rest is returned with the same state and flags, in no set. NULL
 * if there is no descriptor. */
struct span *runs_split(struct runs *runs, struct span *span, size_t pages);

/* The free run that begins right behind span, or NULL. */
struct span *runs_behind(const struct runs *runs, const struct span *span);

/* Makes more of the space usable, as a clean run. */
bool runs_extend(struct runs *runs, size_t pages);

#endif
