/*
 * Free runs of pages, in four sets by two properties. A dirty run may be
 * resident. A clean run holds no memory, and reads as zeros. Either kind lies
 * inside or outside huge-page regions. Neighbours are merged if both properties
 * agree.
 *
 * A request takes the best fit by size, then the lowest address, so that free
 * runs stay long. If no dirty run is long enough, it takes one that is long
 * enough together with the clean runs next to it. Single-owner.
 *
 * A huge-page region is a range, aligned to a huge page, for which the kernel
 * was asked for huge pages. When a part of a region is taken, all of the region
 * counts as dirty, since one touch makes all of it resident. The limit on free
 * memory therefore holds for regions, too.
 */
#ifndef CALM_HEAP_RUNS_H
#define CALM_HEAP_RUNS_H

#include "heap/space.h"
#include "placement/colors.h"

#define RUN_BINS 256

struct run_set {
    size_t pages;
    uint64_t filled[RUN_BINS / 64]; /* bit b is set if bin b is not empty */
    struct span *bins[RUN_BINS];
};

enum run_kind { RUN_DIRTY, RUN_CLEAN, RUN_HUGE_DIRTY, RUN_HUGE_CLEAN, RUN_KINDS };

struct runs {
    struct space *space;
    struct span_ages dirty_ages; /* of all dirty runs, inside and outside regions */
    /* The time that ages are measured in. The caller advances it, and it wraps
     * around. Other threads may read it. */
    _Atomic(uint16_t) now;
    size_t faulted_pages; /* clean pages that became used or dirty; the next touch of each is a fault */
    size_t sparse_pages;  /* those of them that a request preferred to dirty ones */
    size_t region_pages;  /* the number of pages of a huge-page region; 0 (initially): no region is made */
    size_t regions;       /* the number of regions requested so far */
    uint64_t huge_pages_made; /* pages that counted as dirty when their region was made, before their use */
    struct run_set sets[RUN_KINDS];
};

/* Which pages a caller wants, in order of preference. */
enum run_choice {
    RUN_FOR_ANY,    /* resident pages, else clean ones */
    RUN_FOR_LARGE,  /* like RUN_FOR_ANY, but takes from huge-page regions if nothing else is resident */
    RUN_FOR_SPARSE, /* clean pages, since much of the block may never be touched; else like RUN_FOR_LARGE */
    RUN_FOR_HUGE_PAGES, /* pages in huge-page regions, else like RUN_FOR_LARGE; may make a region */
    RUN_FOR_MOVE,       /* clean pages outside regions, to which other pages will be moved */
};

/*
 * Takes a span of this number of pages, in state SPAN_TAKEN. Returns NULL if
 * memory is short. The address of its first page is a multiple of align_pages
 * pages. *clean says whether the span is known to be zero. In a huge-page
 * region, the span starts where `colors` have room, or anywhere if they are
 * NULL.
 */
struct span *runs_take(struct runs *runs, size_t pages, size_t align_pages, enum run_choice choice,
                       const struct colors *colors, bool *clean);

/* Puts a span into a set and merges it with its neighbours. Returns the run
 * that the span has become, or is part of. The descriptor of `span` belongs to
 * the set from now on. */
struct span *runs_put(struct runs *runs, struct span *span, bool clean);

/* Puts a dirty span for which the program requested huge pages. The whole huge
 * pages of the span become huge-page regions. Returns false if there are too
 * many regions or descriptors are short. The span then stays the caller's. */
bool runs_put_as_regions(struct runs *runs, struct span *span);

/* Takes pages out of a free run, behind its first `skip` pages. The rest of the
 * run stays free. Returns a span in state SPAN_TAKEN. Returns NULL, and all of
 * the run stays free, if descriptors are short. */
struct span *runs_carve(struct runs *runs, struct span *run, size_t skip, size_t pages);

/* Like runs_carve, for a purge of a dirty run. Skipped pages stay as cold as
 * the run was, outside huge-page regions. Takes all of the run if descriptors
 * are short. */
struct span *runs_carve_dirty(struct runs *runs, struct span *run, size_t skip, size_t pages);

/* Looks for a clean run among the next few descriptors, from *number on.
 * Returns NULL if none of them is one. Advances *number behind the last
 * descriptor that was read. */
struct span *runs_some_clean(const struct runs *runs, uint32_t *number);

/* Splits a span. `span` keeps the first pages. Returns a span of the other
 * pages, which is in no set and has equal state and flags. Returns NULL if
 * descriptors are short. */
struct span *runs_split(struct runs *runs, struct span *span, size_t pages);

/* Returns the address of a span, in pages. In a huge-page region it is
 * congruent to the physical address. */
static inline uint64_t runs_address_page(const struct runs *runs, const struct span *span) {
    return (uint64_t)(uintptr_t)span->base >> runs->space->page_shift;
}

static inline uint16_t runs_now(const struct runs *runs) {
    return atomic_load_explicit(&runs->now, memory_order_relaxed);
}

static inline void runs_set_now(struct runs *runs, unsigned now) {
    atomic_store_explicit(&runs->now, (uint16_t)now, memory_order_relaxed);
}

/* Returns for how long a run has been dirty. */
static inline uint16_t runs_age(const struct runs *runs, const struct span *run) {
    return (uint16_t)(runs_now(runs) - run->dirty_since);
}

/* Returns whether a dirty run outside huge-page regions has this many pages. */
bool runs_have_dirty(const struct runs *runs, size_t pages);

/* Returns the free run that begins where the span ends, or NULL. */
struct span *runs_next(const struct runs *runs, const struct span *span);

/* If address space is limited, releases the clean runs that are long enough,
 * and also dirty ones if `dirty` is set. Returns the number of pages
 * released. */
size_t runs_release(struct runs *runs, bool dirty);

/* Turns the clean pages at the end of the space into reserved ones, except for
 * a few MiB. Debuggers write usable pages to core files, and a kernel without
 * overcommit charges the process for them. */
void runs_retract(struct runs *runs);

/* Makes at least this number of further pages usable. Returns the clean run
 * that contains them, or NULL if memory is short. */
struct span *runs_extend(struct runs *runs, size_t pages);

/* Returns the number of pages in the whole huge-page regions of a run. Stores
 * the number of pages before the first of them in *skip. */
size_t runs_whole_regions(const struct runs *runs, const struct span *span, size_t *skip);

#endif
