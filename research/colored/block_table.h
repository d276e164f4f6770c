/*
 * The table of colored blocks: which exist, and the mappings of each.
 *
 * A thread that makes or frees a block first claims its entry, by a compare-and-swap; from then on the entry
 * is that thread's alone. So no lock is needed, and the child of a fork can tell which blocks were being made
 * or freed by threads that it lacks. Preserves errno; allocates nothing.
 */
#ifndef CALM_COLORED_BLOCK_TABLE_H
#define CALM_COLORED_BLOCK_TABLE_H

#include "colored/calmcolored.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct page_range {
    _Atomic(char *) base; /* NULL: there is none */
    size_t bytes;
};

struct block {
    _Atomic(uintptr_t) state;  /* an address, or one of the states of block_table.c */
    struct page_range pages;   /* what the program gets */
    struct page_range surplus; /* what it is chosen from, while the block is made */
    size_t moved_pages;        /* pages that became mappings of their own (page_mover.h) */
    struct calm_colored stats;
};

/* Claims an entry without a block. NULL if as many blocks exist as can. */
struct block *block_claim_vacant(void);

/* Claims the entry of the block at an address. NULL if there is none. */
struct block *block_claim(const void *address);

/* Ends a claim: releases the surplus, and the block exists. Returns its address. */
void *block_publish(struct block *block);

/* Ends a claim: releases all that the entry has, and the block does not exist. */
void block_discard(struct block *block);

/* Copies what was noted when the block at an address was made. False if there is none. */
bool block_stats(const void *address, struct calm_colored *stats);

/* In the child of a fork: discards all blocks that are claimed. */
void block_table_after_fork(void);

/* Reserves address space that the kernel will not fill with huge pages. NULL if there is no room. Only for
 * the thread that has claimed the entry, as mapping_release. */
char *mapping_reserve(struct page_range *mapping, size_t bytes);
void mapping_release(struct page_range *mapping);

#endif
