/*
 * Blocks of size classes: taken from slabs, the lowest addresses first, and put back.
 *
 * Single-owner, except heap_plan_puts.
 */
#ifndef CALM_HEAP_SLAB_BLOCKS_H
#define CALM_HEAP_SLAB_BLOCKS_H

#include "heap/heap.h"

struct take_options {
    enum run_choice new_slabs; /* where they are to be */
    /* Makes pages resident before their blocks are handed out; NULL: their first use does. */
    bool (*prefault)(void *base, size_t bytes);
};

/* Up to count blocks of a class; returns how many there was memory for. */
size_t heap_take_blocks(struct heap *heap, uint32_t class, void **blocks, size_t count,
                        const struct take_options *options);

/* Blocks of any classes. A pointer that is no block in use is recorded as misuse and skipped. */
void heap_put_blocks(struct heap *heap, void *const *blocks, size_t count);

/*
 * The same in two parts, so that little is done under the heap's lock. To plan is for the blocks' owner, any
 * thread: it finds out which bits of which slabs they are. Blocks that exceed the plan follow under the lock,
 * and so do those that are not as planned: no block in use, or next to a purge.
 */
#define MAX_HEAP_PUTS 32

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
    struct slab_bits of[MAX_HEAP_PUTS];
};

void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);
void heap_put_planned(struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count);

#endif
