/*
 * The heap: blocks of size classes from slabs, larger ones as runs of pages, and free pages for whoever
 * purges.
 *
 * An instance without globals, and plain single-owner code: its caller holds a lock, or is the one thread
 * that owns it. It never purges by itself: it counts what could be, and hands it out (heap_take_dirty) to be
 * purged without the heap, and takes it back (heap_put_back).
 *
 * Nothing of the heap's lies in, before or between blocks, so that any page without a block in use can be
 * purged.
 */
#ifndef CALM_HEAP_HEAP_H
#define CALM_HEAP_HEAP_H

#include "heap/runs.h"
#include "heap/size_class.h"
#include "heap/space.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

enum misuse { MISUSE_INVALID_FREE, MISUSE_DOUBLE_FREE };

#define MISUSE_NOTES 16

struct misuse_note {
    enum misuse kind;
    const void *pointer;
};

/* Slabs of one class that have a free block; current is in no order. */
struct slab_bin {
    struct span *current;
    struct span *part_used;
};

struct heap {
    struct space space;
    struct runs runs;
    const struct size_classes *classes;
    struct slab_bin bins[SIZE_CLASSES];
    struct span_ages slab_ages[2]; /* slabs with free dirty pages; those in huge regions apart */
    /* Where a free names no block in use: counted, noted for whoever reports it, and misused called unless it
     * is NULL. The heap is intact. */
    void (*misused)(enum misuse kind, const void *pointer);
    size_t misuses;
    struct misuse_note misuse[MISUSE_NOTES]; /* the latest: number n at n % MISUSE_NOTES */

    /* Makes pages of slabs resident before their blocks are handed out; NULL: who touches them does. And the
     * stretch of them that waits for it. */
    void (*make_ready)(void *base, size_t bytes);
    enum run_choice slab_choice; /* where new slabs are to lie */
    bool spreads;                /* whether blocks of a huge page or more begin where colors have room */
    struct colors colors;
    uint32_t fresh_page;
    uint32_t fresh_pages;

    /* In pages. Dirty pages in runs are counted by runs. */
    size_t used_pages;       /* with a byte of a block in use: slabs page by page, and large blocks */
    size_t slab_dirty_pages; /* of slabs, without a block in use, and perhaps resident */
    const struct purge_batch *claims; /* what heap_take_dirty handed out of slabs, until it comes back */
    size_t claimed_pages;             /* of the used pages: those only of blocks that a purge has claimed */
    size_t purging_pages;             /* handed out by heap_take_dirty */
    uint64_t dirtied_pages;           /* that became free, since the start */
    uint64_t large_allocations;
    uint64_t moves;     /* of large blocks' pages */
    size_t moved_spans; /* large blocks that the kernel keeps a mapping for each */
    size_t ahead_pages; /* of large blocks in use that were made resident before their owners touched them */
};

/* address_space: bytes to reserve at most. classes must outlive the heap. False if there is no memory. */
bool heap_init(struct heap *heap, const struct size_classes *classes, size_t address_space,
               void (*misused)(enum misuse kind, const void *pointer));

/* Up to count blocks of a class; returns how many there were memory for. */
size_t heap_take_blocks(struct heap *heap, uint32_t class, void **blocks, size_t count);

/* Blocks of any classes. What is not a block in use is reported and skipped. */
void heap_put_blocks(struct heap *heap, void *const *blocks, size_t count);

/*
 * The same in two parts, so that least is done under the heap's lock. To plan is for the blocks' owner, any
 * thread: it finds out which bits of which slabs they are. What is more than the plan has room for follows
 * under the lock, and so does what may not be as planned: what is no block in use, or beside a purge.
 */
#define HEAP_PUTS_MOST 32

struct slab_bits {
    struct span *slab; /* NULL: for a pointer that is no block of a slab */
    char *base;        /* of the slab, as planned */
    uint64_t bits;     /* blocks of one word of its bitmap */
    uint16_t word;
    uint16_t count; /* pointers */
    uint8_t class;
};

struct heap_puts {
    size_t planned; /* pointers */
    size_t count;
    struct slab_bits of[HEAP_PUTS_MOST];
};

void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);
void heap_put_planned(struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);

/* A block of whole pages; *zero says whether it is known to be zero. NULL if memory is short. Its owner may
 * have it begin later: heap_place_large. */
void *heap_take_large(struct heap *heap, size_t pages, size_t align_pages, enum run_choice choice,
                      bool *zero);

/* Counts a new block as one that is made resident before its owner touches it, until it is freed or resized.
 */
void heap_note_ahead(struct heap *heap, void *block);

/* The block begins so many bytes into its first page from now on. Returns where. For the block's owner, any
 * thread, before anybody else knows of it. */
void *heap_place_large(struct span *span, size_t offset);

/* What heap_put_large leaves to do. */
enum put_large {
    PUT_DONE,
    PUT_MISUSED,
    PUT_RENEW, /* *renew is out of the heap; os_renew its range, then give it back by heap_put_renewed */
};
enum put_large heap_put_large(struct heap *heap, void *block, struct span **renew);
void heap_put_renewed(struct heap *heap, struct span *span, bool renewed);

/* The span of a large block in use that begins at block; NULL if there is none. For the block's owner, any
 * thread. */
struct span *heap_large_span(const struct heap *heap, const void *block);

/* The same by where its span begins. */
struct span *heap_large_span_at(const struct heap *heap, const void *base);

/* Makes a large block's span so many pages long where it is. False, and nothing changed, if it cannot. */
bool heap_resize_large(struct heap *heap, struct span *span, size_t pages);

/* from's pages were moved to to by os_move_pages: from is free, and clean. */
void heap_moved(struct heap *heap, struct span *from, struct span *to);

/* Whether one more block may be moved: each costs the process a mapping. */
bool heap_may_move(const struct heap *heap);

/* Pages that hold a byte of a block. */
static inline size_t heap_used_pages(const struct heap *heap) {
    return heap->used_pages - heap->claimed_pages;
}

/* Pages that hold no block and may be resident. */
static inline size_t heap_dirty_pages(const struct heap *heap) {
    return runs_dirty_pages(&heap->runs) + heap->slab_dirty_pages;
}

#define PURGE_RANGES 1024
#define PURGE_BYTES  ((size_t)16 << 20)

/* Ranges on their way to be purged, about 16 MiB at most. */
struct purge_batch {
    size_t count;
    size_t pages;
    struct iovec ranges[PURGE_RANGES];
    uint16_t claimed[PURGE_RANGES];   /* pages that count as used by the claim alone */
    struct span *spans[PURGE_RANGES]; /* the run, or the slab, that a range is of */
};

enum purge_depth {
    PURGE_RUNS,  /* free runs, and of huge regions only whole ones */
    PURGE_SLABS, /* after those, pages within slabs */
    PURGE_SPLIT, /* after those, parts of huge regions, of slabs too, for which the kernel must split huge
                    pages */
};

/*
 * Takes up to pages of dirty pages out of the free set, the coldest first. Returns the pages taken: a little
 * more where pages within slabs or whole huge regions are among them, and at most about 16 MiB.
 */
size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth);

/* Two ranges of a batch change places. */
void purge_batch_swap(struct purge_batch *batch, size_t a, size_t b);

/* The first purged ranges of the batch are clean now, and the rest is as dirty as before. */
void heap_put_back(struct heap *heap, struct purge_batch *batch, size_t purged);

#endif
