/*
 * Spans: ranges of pages that serve one purpose. Each has a descriptor, which
 * is outside its pages. This file also has the two orders that spans are kept
 * in: by address and by age.
 *
 * All files of the heap use spans. Single-owner, like the heap itself.
 */
#ifndef CALM_HEAP_SPAN_H
#define CALM_HEAP_SPAN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum span_state {
    SPAN_UNUSED, /* the descriptor has no span */
    SPAN_DIRTY,  /* a free run that may be resident */
    SPAN_CLEAN,  /* a free run that holds no memory, and reads as zeros */
    SPAN_TAKEN,  /* in no set: the thread that took it decides its next state; also during a purge */
    SPAN_SLAB,   /* blocks of one size class */
    SPAN_LARGE,  /* one block */
    SPAN_LOST,   /* pages that could not be renewed, and are never used again */
};

/* The neighbours in a list from cold to hot. */
struct span_link {
    struct span *colder;
    struct span *hotter;
};

struct span {
    char *base;
    uint32_t page; /* the number of the first page */
    uint32_t pages;
    /* Links in an order by address: a bin of free runs, or the part-used slabs
     * of a class. */
    struct span *child;
    struct span *next;
    struct span *previous;
    union {
        struct span_link age; /* of dirty runs, and of slabs with free dirty pages */
        size_t offset;        /* large: where the block begins in its first page, in bytes */
    };
    union {
        uint16_t used_blocks; /* slabs */
        uint16_t dirty_since; /* dirty runs: runs->now when the run came to its set */
    };
    uint16_t free_dirty_pages;
    uint8_t size_class;
    uint8_t state;    /* enum span_state */
    bool claimed : 1; /* slab: a purge has claimed some of its free blocks */
    bool moved : 1;   /* large: its pages were moved here, and the kernel keeps a mapping for them */
    bool fresh : 1;   /* large: pages of it are resident only if its owner touched them */
    bool guessed : 1; /* large: its memory may be resident, without evidence that the program touches it */
    bool colored : 1; /* large: counted in heap->colors */
    bool huge : 1;    /* in a huge-page region: one touch makes all of the region resident */
    _Atomic(uint8_t) marks; /* slabs, large: what the program did to pages of its blocks: marks.h */
    uint64_t allocated[];   /* slabs: a bit for each block, set if in use; enough for a slab of any class */
};

/* A priority queue by address, the lowest first: a pairing heap (Fredman et
 * al., 1986). */
void address_order_insert(struct span **root, struct span *span);
void address_order_remove(struct span **root, struct span *span);

/* A list of spans by age. */
struct span_ages {
    struct span *coldest;
    struct span *hottest;
};

void span_ages_append(struct span_ages *ages, struct span *span);
void span_ages_prepend(struct span_ages *ages, struct span *span); /* as the coldest */
void span_ages_remove(struct span_ages *ages, struct span *span);

#endif
