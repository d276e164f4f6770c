/*
 * A heap: its state, and what other folders ask of it.
 *
 * The folder, from the bottom up; each file uses only files before it: size_class.h; span.h, runs of pages
 * and their orders; span_table.h, their descriptors; space.h, address space and what is known of each page;
 * runs.h, free runs; heap.h; marks.h, what the program did to pages of its blocks; large_blocks.h, blocks of
 * whole pages; slab.h, one slab; purge_batch.h, free pages on their way to the kernel; slab_blocks.h, blocks
 * of size classes. blocks_layout.h is for readers outside the process.
 *
 * An instance without globals, and single-owner: the caller holds a lock, or is the one thread that owns the
 * heap. Nothing of the heap is stored in, before or between blocks, so that any page without a block in use
 * can be purged. The heap never purges by itself: it counts what could be, and hands it out.
 */
#ifndef CALM_HEAP_HEAP_H
#define CALM_HEAP_HEAP_H

#include "heap/runs.h"
#include "heap/size_class.h"
#include "heap/space.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum misuse { MISUSE_INVALID_FREE, MISUSE_DOUBLE_FREE };

#define MISUSE_RECORDS 16

/* A free that named no block in use. late: it was made by an earlier call, after which a cache held the
 * pointer. */
struct misuse_record {
    enum misuse kind;
    bool late;
    const void *pointer;
};

/* The slabs of one class that have a free block; current is in no order, and may be full. */
struct slab_bin {
    struct span *current;
    struct span *part_used;
};

struct purge_batch;

/* The large tables are last: a program that needs little touches few pages. */
struct heap {
    const struct size_classes *classes;
    struct slab_bin bins[SIZE_CLASSES];
    struct span_ages slab_ages[2]; /* slabs with free dirty pages; those in huge-page regions apart */
    struct colors colors;          /* of the large blocks in huge-page regions */
    const void *freed_now; /* the block whose free is in progress; NULL: of others, as caches are emptied */
    size_t misuses;
    struct misuse_record misuse[MISUSE_RECORDS]; /* the latest: number n at n % MISUSE_RECORDS */

    /* In pages. Dirty pages in runs are counted by runs. */
    size_t used_pages;       /* with a byte of a block in use: slabs page by page, and large blocks */
    size_t slab_dirty_pages; /* of slabs, without a block in use, that may be resident */
    const struct purge_batch *claims; /* what heap_take_dirty took out of slabs, until heap_put_back */
    size_t claimed_pages;             /* of the used pages: those only of blocks that a purge has claimed */
    size_t purging_pages;             /* handed out by heap_take_dirty */
    uint64_t dirtied_pages;           /* that became free, since the start */
    uint64_t large_allocations;
    uint64_t moves;           /* of large blocks' pages */
    size_t moved_spans;       /* large blocks for each of which the kernel keeps a mapping */
    size_t guessed_pages;     /* of large blocks: span->guessed */
    _Atomic(bool) has_absent; /* blocks had pages that children do not inherit: marks.h */
    bool purge_is_lost;       /* heap_lose_purge: counts include pages whose purge never ends */
    struct runs runs;
    struct space space;
};

/* Reserves at most so much address space. classes must outlive the heap. False if there is no memory. */
bool heap_init(struct heap *heap, const struct size_classes *classes, size_t address_space);

/* Records a free that named no block in use. heap_note_wild_free: of a pointer to no block of a slab, which
 * is a double free if its page is free. */
void heap_note_misuse(struct heap *heap, enum misuse kind, const void *pointer);
void heap_note_wild_free(struct heap *heap, const void *pointer);

/* Pages that hold a byte of a block. */
static inline size_t heap_used_pages(const struct heap *heap) {
    return heap->used_pages - heap->claimed_pages;
}

/* Pages that hold no block and may be resident. */
static inline size_t heap_dirty_pages(const struct heap *heap) {
    const struct run_set *sets = heap->runs.sets;
    return sets[RUN_DIRTY].pages + sets[RUN_HUGE_DIRTY].pages + heap->slab_dirty_pages;
}

/* The size class of the slab that an address is in; 0 for other pages of the heap; -1 if it is not the
 * heap's. Any thread. */
static inline int heap_class_at(const struct heap *heap, const void *address) {
    uint32_t page = space_page(&heap->space, address);
    return page == 0 || !space_is_usable(&heap->space, page) ? -1 : heap->space.class_of[page];
}

#endif
