/*
 * Slabs: spans of blocks of one size class. A slab knows for each block whether it is in use, and for each
 * page how many blocks in use touch it, so that a page can be purged as soon as the last of them is free.
 *
 * Single-owner; called by slab_blocks.c and purge_batch.c alone.
 */
#ifndef CALM_HEAP_SLAB_H
#define CALM_HEAP_SLAB_H

#include "heap/heap.h"

/* Pages to be made resident before their blocks are handed out: one stretch at a time. */
struct prefault {
    bool (*populate)(void *base, size_t bytes);
    char *base;
    size_t bytes;
};

/* Takes up to count free blocks, the lowest, and returns how many. Stores them backwards from end, since a
 * stack hands out the last first. prefault: pages that may not be resident are added to it; NULL: they are
 * not. */
size_t slab_take(struct heap *heap, struct span *slab, void **end, size_t count, struct prefault *prefault);

/* Populates the pages that wait for it. */
void prefault_finish(struct prefault *prefault);

static inline bool slab_is_full(const struct heap *heap, const struct span *slab) {
    return slab->used_blocks == heap->classes->of[slab->class].slab_blocks;
}

/* Whether a block is in use, by its number. */
static inline bool slab_has(const struct span *slab, size_t block) {
    return (slab->allocated[block / 64] >> (block % 64) & 1) != 0;
}

/* Blocks in use become free: those of a word of the slab's bitmap. An empty slab becomes a free run. */
void slab_put(struct heap *heap, struct span *slab, size_t word, uint64_t bits);

/* A span of the class's slab_pages becomes a slab. */
void slab_open(struct heap *heap, struct span *span, uint32_t class, bool clean);

/*
 * For a purge: finds the next stretch of free dirty pages from page *end of the slab on, and takes the blocks
 * that touch it: pages *first to *end - 1. False if there is none. slab_return gives the blocks back.
 */
bool slab_claim(struct heap *heap, struct span *slab, size_t *first, size_t *end);
void slab_return(struct heap *heap, struct span *slab, size_t first, size_t pages, bool purged);

#endif
