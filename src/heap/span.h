/*
 * Spans: runs of pages that serve one purpose, each with a descriptor of its own outside them; and the two
 * orders that they are kept in, by address and by age.
 *
 * Every file of the heap works on these. Single-owner, as the heap itself.
 */
#ifndef CALM_HEAP_SPAN_H
#define CALM_HEAP_SPAN_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum span_state {
    SPAN_UNUSED, /* the descriptor describes nothing */
    SPAN_DIRTY,  /* a free run that may be resident */
    SPAN_CLEAN,  /* a free run that is known to be zero, and holds no memory */
    SPAN_TAKEN,  /* in no set: its taker decides what it becomes; during a purge the purger */
    SPAN_SLAB,   /* blocks of one size class */
    SPAN_LARGE,  /* one block */
    SPAN_LOST,   /* pages that could not be renewed: never used again */
};

/* In a list from cold to hot. */
struct span_link {
    struct span *colder;
    struct span *hotter;
};

struct span {
    char *base;
    uint32_t page; /* the number of the first; consecutive within a segment */
    uint32_t pages;
    /* In an order by address: a bin of free runs, or the part-used slabs of a class. */
    struct span *child;
    struct span *next;
    struct span *previous;
    union {
        struct span_link age; /* dirty runs, and slabs with free dirty pages */
        size_t offset;        /* large: bytes to where the block begins, within its first page */
    };
    uint16_t used_blocks; /* slabs */
    uint16_t free_dirty_pages;
    uint8_t class;
    uint8_t state;          /* enum span_state */
    bool claimed : 1;       /* slab: a purge has some of its free blocks */
    bool moved : 1;         /* large: its pages were moved here, and the kernel keeps a mapping for them */
    bool fresh : 1;         /* large: none but its owner made pages of it resident */
    bool guessed : 1;       /* large: of memory that may be resident, without evidence that it is touched */
    bool colored : 1;       /* large: counted among those that begin at its color */
    bool huge : 1;          /* in a huge-page region: one touch makes all of it resident */
    _Atomic(uint8_t) marks; /* slabs, large: what the program did to pages of its blocks: marks.h */
    uint64_t allocated[];   /* slabs: one bit a block; as many words as a slab of any class needs */
};

/* A priority queue by address, lowest first: a pairing heap (Fredman et al., 1986). */
void address_order_insert(struct span **root, struct span *span);
void address_order_remove(struct span **root, struct span *span);

/* A list by age. */
struct span_ages {
    struct span *coldest;
    struct span *hottest;
};

void span_ages_append(struct span_ages *ages, struct span *span);
void span_ages_prepend(struct span_ages *ages, struct span *span); /* as the coldest */
void span_ages_remove(struct span_ages *ages, struct span *span);

#endif
