/*
 * Blocks of size classes. Slabs are filled from the lowest addresses.
 *
 * Single-owner, except for heap_plan_puts.
 */
#ifndef CALM_HEAP_SLAB_BLOCKS_H
#define CALM_HEAP_SLAB_BLOCKS_H

#include "heap/heap.h"

/* Takes up to `count` blocks of a class. Returns the number of blocks taken,
 * which is lower if memory is short. */
size_t heap_take_blocks(struct heap *heap, uint32_t size_class, void **blocks, size_t count);

/* Returns whether heap_take_blocks finds a block without new memory: in a slab,
 * or by a slab of dirty pages. */
bool heap_has_blocks(const struct heap *heap, uint32_t size_class);

/* Frees blocks of any classes. Records each pointer to no block in use as an
 * invalid or double free, and skips it. */
void heap_put_blocks(struct heap *heap, void *const *blocks, size_t count);

/*
 * heap_put_blocks in two parts, so that the heap's lock is held for a short
 * time. heap_plan_puts finds the slabs and bits of the blocks without the lock.
 * Any thread that owns the blocks may call it. heap_put_planned frees the
 * blocks under the lock. If there are more blocks than the plan has room for,
 * it plans the others under the lock. It looks up a block again if a purge has
 * claimed blocks of the slab, or if the block is not in use.
 */
#define MAX_HEAP_PUTS 32

struct slab_bits {
    struct span *slab; /* NULL for a pointer to no block of a slab */
    char *base;        /* the slab's base, as planned */
    uint64_t bits;     /* the blocks, as bits of one word of the slab's bitmap */
    uint16_t word;
    uint16_t count; /* the number of pointers */
    uint8_t size_class;
};

struct heap_puts {
    size_t planned; /* the number of pointers in the plan */
    size_t count;
    struct slab_bits of[MAX_HEAP_PUTS];
};

void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);
void heap_put_planned(struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);

#endif
