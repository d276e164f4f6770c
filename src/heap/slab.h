/*
 * Slabs: spans of blocks of one size class. A slab knows which blocks are in
 * use, and the heap knows for each page how many of them touch it. A page can
 * therefore be purged as soon as its last block is free.
 *
 * Single-owner. Only slab_blocks.c and purge_batch.c change slabs.
 */
#ifndef CALM_HEAP_SLAB_H
#define CALM_HEAP_SLAB_H

#include "heap/heap.h"

/* Takes up to `count` free blocks, those of the lowest addresses. Returns the
 * number of blocks taken. Stores them backwards from `end`, since a stack hands
 * out its last block first. */
size_t slab_take(struct heap *heap, struct span *slab, void **end, size_t count);

static inline bool slab_is_full(const struct heap *heap, const struct span *slab) {
    return slab->used_blocks == heap->classes->of[slab->size_class].slab_blocks;
}

/* Returns whether the block of this number is in use. */
static inline bool slab_has(const struct span *slab, size_t block) {
    return (slab->allocated[block / 64] >> (block % 64) & 1) != 0;
}

/* Frees blocks of one word of the slab's bitmap, all of them in use. An empty
 * slab becomes free runs. */
void slab_put(struct heap *heap, struct span *slab, size_t word, uint64_t bits);

/* Turns a span of slab_pages pages of the class into a slab. */
void slab_open(struct heap *heap, struct span *span, uint32_t size_class, bool clean);

/*
 * Claims blocks for a purge. Finds the next free dirty pages from page *end of
 * the slab on, and takes all blocks that touch them. Stores the first of these
 * pages in *first, and the number after the last in *end. Returns false if
 * there are none. slab_return frees the claimed blocks.
 */
bool slab_claim(struct heap *heap, struct span *slab, size_t *first, size_t *end);
void slab_return(struct heap *heap, struct span *slab, size_t first, size_t pages, bool purged);

#endif
