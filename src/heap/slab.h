/*
 * Slabs: spans of blocks of one size class. A slab knows for each block whether it is in use, and for each
 * page how many blocks in use touch it, so that a page can be purged as soon as the last of them is free.
 * Single-owner; part of the heap, which alone calls it.
 */
#ifndef CALM_HEAP_SLAB_H
#define CALM_HEAP_SLAB_H

#include "heap/heap.h"

/* Takes up to count free blocks, the lowest, and returns how many it took. Backwards from end: a stack hands
 * out the last first. */
size_t slab_take(struct heap *heap, struct span *slab, void **end, size_t count);

/* Makes those pages of what was taken resident that may not be; where the heap is to do so. */
void slab_make_ready(struct heap *heap);

/* The number of the block that begins so many bytes into a slab of the class; -1 if none begins there. */
static inline long slab_block_at(const struct size_class *class, size_t offset) {
    size_t block = size_class_block_at(class, offset);
    return block < class->slab_blocks && block * class->size == offset ? (long)block : -1;
}

static inline bool slab_in_use(const struct span *slab, size_t block) {
    return (slab->allocated[block / 64] >> (block % 64) & 1) != 0;
}

/* Blocks in use become free: those of a word of the slab's bitmap. */
void slab_put(struct heap *heap, struct span *slab, size_t word, uint64_t bits);

/* A span of the class's slab_pages becomes a slab, and an empty slab a span. */
void slab_open(struct heap *heap, struct span *span, uint32_t class, bool clean);
void slab_close(struct heap *heap, struct span *slab);

/*
 * For a purge: finds the next stretch of free dirty pages from page *from of the slab on, takes the blocks
 * that touch it, and says which pages they are. False if there is none. slab_return gives the blocks back.
 */
bool slab_claim(struct heap *heap, struct span *slab, size_t *from, size_t *first, size_t *pages);
void slab_return(struct heap *heap, struct span *slab, size_t first, size_t pages, bool purged);

#endif
