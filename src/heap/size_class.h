/*
 * Size classes: 16 bytes apart up to 128, then eight to each doubling, so that above 128 bytes less than an
 * eighth of a block is waste. Class 0 means no class. Pure; the tables are filled once for the kernel's page
 * size, and then read by all threads.
 */
#ifndef CALM_HEAP_SIZE_CLASS_H
#define CALM_HEAP_SIZE_CLASS_H

#include <stddef.h>
#include <stdint.h>

#define SIZE_QUANTUM     16
#define SIZE_CLASSES     108 /* enough for slabs of 64 KiB pages */
#define SIZE_TABLE_BYTES 1024
/* The smallest medium block: whether such blocks are adjacent matters less than the way to the heap. */
#define MIN_MEDIUM_SIZE 1024

/* Blocks of one class in one CPU cache before it grows; half of them move at once, and one more. */
#define MAX_CACHE_BLOCKS    256
#define MAX_MAGAZINE_BLOCKS (MAX_CACHE_BLOCKS / 2 + 1)
#define MAX_GROWN_BLOCKS    1024

struct size_class {
    uint32_t size;
    uint32_t inverse; /* ceil(2^32 / size): see size_class_block_at */
    uint16_t slab_pages;
    uint16_t slab_blocks;
    uint16_t batch;      /* blocks that move between a CPU cache, the depot and the heap at once */
    uint16_t max_cached; /* blocks in one CPU cache at first */
    uint16_t max_grown;  /* the same once it has grown: cache/growth.h */
};

struct size_classes {
    uint32_t count;           /* classes are 1 to count - 1 */
    uint32_t max_size;        /* of the last class; a larger block is a run of pages */
    uint32_t max_slab_blocks; /* in a slab of any class */
    struct size_class of[SIZE_CLASSES];
    uint8_t small[SIZE_TABLE_BYTES / SIZE_QUANTUM + 1]; /* class of (size + 15) / 16 */
};

void size_classes_fill(struct size_classes *classes, size_t page_size);

/* The number of the block that a byte of a slab belongs to; after the last block, that of a block that would
 * follow. The product is too high by less than one: by one block, if the pages are large. */
static inline size_t size_class_block_at(const struct size_class *class, size_t offset) {
    size_t block = (size_t)(((uint64_t)offset * class->inverse) >> 32);
    return block * class->size > offset ? block - 1 : block;
}

/* The class of a size from 129 on, at most max_size. */
static inline uint32_t size_class_above_128(size_t size) {
    size_t last = size - 1;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(last);
    return 9 + (exponent - 7) * 8 + ((uint32_t)(last >> (exponent - 3)) & 7);
}

/* The class of a size of at most max_size; of 0 bytes, that of 1. */
static inline uint32_t size_class_of(const struct size_classes *classes, size_t size) {
    if (__builtin_expect(size <= SIZE_TABLE_BYTES, 1)) {
        return classes->small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM];
    }
    return size_class_above_128(size);
}

#endif
