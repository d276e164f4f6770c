/*
 * A heap: its state, and what other layers need of it.
 *
 * The files of the layer, from the bottom up:
 *
 *   size_class.h     size classes
 *   span.h           spans, and the orders that they are kept in
 *   span_table.h     the descriptors of spans
 *   space.h          address space, and the metadata of each page
 *   runs.h           free runs
 *   heap.h
 *   marks.h          what the program did to the pages of its blocks
 *   large_blocks.h   blocks of whole pages
 *   slab.h           one slab
 *   purge_batch.h    free pages on their way to the kernel
 *   slab_blocks.h    blocks of size classes
 *
 * Each file uses only files above it in this list. walk.h checks a heap.
 * blocks_layout.h is for readers in other processes.
 *
 * A heap is an instance without globals, and single-owner: the caller holds the
 * heap's lock, or is the one thread that owns the heap. No metadata is stored
 * in, before or between blocks, so that a purge can take any page without a
 * block in use. The heap never purges by itself. It counts dirty pages, and
 * hands them out to be purged.
 */
#ifndef CALM_HEAP_HEAP_H
#define CALM_HEAP_HEAP_H

#include "base/size_class.h"
#include "heap/runs.h"
#include "heap/space.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum misuse { MISUSE_INVALID_FREE, MISUSE_DOUBLE_FREE };

#define MISUSE_RECORDS 16

/* A free of a pointer that is no block in use. `late` means that an earlier
 * call made it, and that a cache held the pointer until now. */
struct misuse_record {
    enum misuse kind;
    bool late;
    const void *pointer;
};

/* The slabs of one class that have a free block. The heap takes blocks from
 * `current`, which is not in the order of the others and may be full. */
struct slab_bin {
    struct span *current;
    struct span *part_used;
};

struct purge_batch;

/* The large tables come last, so that a program that needs little memory
 * touches few pages. */
struct heap {
    const struct size_classes *classes;
    struct slab_bin bins[SIZE_CLASSES];
    struct span_ages slab_ages[2]; /* slabs with free dirty pages; [1]: those in huge-page regions */
    const void *freed_now;         /* the block that the program is freeing; NULL during a flush of caches */
    size_t misuses;

    /* Counts of pages. The runs count their own dirty pages. */
    size_t used_pages;                /* pages with a byte of a block in use, and all pages of large blocks */
    size_t slab_dirty_pages;          /* pages of slabs that may be resident and hold no block in use */
    const struct purge_batch *claims; /* the batch that claimed blocks, until heap_put_back */
    size_t claims_begin, claims_end;  /* the claimed blocks are in these ranges of the batch */
    size_t claimed_pages;             /* used pages that hold only blocks claimed by a purge */
    size_t purging_pages;             /* pages taken out of the heap to be purged or renewed */
    uint64_t dirtied_pages;           /* pages that became free and dirty, since the start */
    uint64_t large_allocations;
    uint64_t moves;           /* the number of times that a large block's pages were moved */
    size_t moved_spans;       /* moved large blocks; the kernel keeps a mapping for each */
    size_t guessed_pages;     /* pages of large blocks with span->guessed */
    _Atomic(bool) has_absent; /* some block had pages that children do not inherit: marks.h */
    bool purge_is_lost;       /* set by heap_lose_purge: the counts include pages whose purge never ends */
    struct runs runs;
    struct space space;
    /* Last, since few programs need them. */
    struct misuse_record misuse[MISUSE_RECORDS]; /* the latest records; number n is at n % MISUSE_RECORDS */
    struct colors colors;                        /* the colors of the large blocks in huge-page regions */
};

/* Reserves at most `address_space` bytes. `classes` must outlive the heap.
 * Returns false if memory is short. */
bool heap_init(struct heap *heap, const struct size_classes *classes, size_t address_space);

/* heap_init for a heap whose address space is a part of a long range. */
bool heap_init_part(struct heap *heap, const struct size_classes *classes, const struct page_map *map,
                    unsigned part);

/* Record a free of a pointer that is no block in use. heap_note_wild_free is
 * for a pointer that is no block of a slab. It records a double free if the
 * pointer's page is free, else an invalid free. */
void heap_note_misuse(struct heap *heap, enum misuse kind, const void *pointer);
void heap_note_wild_free(struct heap *heap, const void *pointer);

/* Returns the number of pages that hold a byte of a block in use. */
static inline size_t heap_used_pages(const struct heap *heap) {
    return heap->used_pages - heap->claimed_pages;
}

/* Returns whether a class may have a slab with a free block: a guess, since
 * another thread may be changing the heap. Any thread; ThreadSanitizer ignores
 * the read. */
static inline __attribute__((no_sanitize("thread"))) bool heap_may_have(const struct heap *heap,
                                                                        uint32_t size_class) {
    return __atomic_load_n(&heap->bins[size_class].part_used, __ATOMIC_RELAXED) != NULL;
}

/* Returns the number of pages that hold no block in use and may be resident. */
static inline size_t heap_dirty_pages(const struct heap *heap) {
    const struct run_set *sets = heap->runs.sets;
    return sets[RUN_DIRTY].pages + sets[RUN_HUGE_DIRTY].pages + heap->slab_dirty_pages;
}

/* Returns the size class of the slab that contains the address, 0 for other
 * pages of the heap, and -1 outside the heap. Any thread. */
static inline int heap_class_at(const struct heap *heap, const void *address) {
    uint32_t page = space_page(&heap->space, address);
    return page == 0 || !space_is_usable(&heap->space, page) ? -1 : heap->space.class_of[page];
}

#endif
