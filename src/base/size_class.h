/*
 * Size classes. They are 16 bytes apart up to 128 bytes. Above 128 bytes, there
 * are eight for each doubling, so less than an eighth of a block is waste.
 * Class 0 means that a size has no class. Pure. The tables are filled once for
 * the kernel's page size. Then all threads read them.
 */
#ifndef CALM_HEAP_SIZE_CLASS_H
#define CALM_HEAP_SIZE_CLASS_H

#include <stddef.h>
#include <stdint.h>

#define SIZE_QUANTUM     16
#define SIZE_CLASSES     108 /* enough for slabs of 64 KiB pages */
#define SIZE_TABLE_BYTES 1024
/* The smallest medium block. Blocks from the heap are adjacent, which is worth
 * the longer way for small blocks only. A depot may therefore keep more medium
 * blocks. */
#define MIN_MEDIUM_SIZE 1024

/* The number of blocks of one class in a CPU cache before it grows. A magazine
 * has half of them, and one more block. */
#define MAX_CACHE_BLOCKS    256
#define MAX_MAGAZINE_BLOCKS (MAX_CACHE_BLOCKS / 2 + 1)
#define MAX_GROWN_BLOCKS    1024

struct size_class {
    uint32_t size;
    uint32_t inverse; /* ceil(2^32 / size): see size_class_block_at */
    uint16_t slab_pages;
    uint16_t slab_blocks;
    uint16_t batch;      /* the blocks of a magazine, which moves between a CPU cache, a depot and the heap */
    uint16_t max_cached; /* blocks in one CPU cache before it grows */
    uint16_t max_grown;  /* blocks in one CPU cache after it has grown: cache/growth.h */
};

struct size_classes {
    uint32_t count;           /* classes are 1 to count - 1 */
    uint32_t max_size;        /* the size of the last class; a larger block is a run of pages */
    uint32_t max_slab_blocks; /* the highest number of blocks in a slab of any class */
    struct size_class of[SIZE_CLASSES];
    uint8_t small[SIZE_TABLE_BYTES / SIZE_QUANTUM + 1]; /* the class of each (size + 15) / 16 */
};

void size_classes_fill(struct size_classes *classes, size_t page_size);

/* Returns the number of the block that contains a byte of a slab. A byte behind
 * the last block gets the number of the block that would follow. The product
 * offset * inverse / 2^32 is too high by less than 1. If pages are large, its
 * integer part may therefore be one too high. */
static inline size_t size_class_block_at(const struct size_class *size_class, size_t offset) {
    size_t block = (size_t)(((uint64_t)offset * size_class->inverse) >> 32);
    return block * size_class->size > offset ? block - 1 : block;
}

/* Returns the class of a size above 128 and up to max_size. */
static inline uint32_t size_class_above_128(size_t size) {
    size_t last = size - 1;
    uint32_t exponent = 63 - (uint32_t)__builtin_clzll(last);
    return 9 + (exponent - 7) * 8 + ((uint32_t)(last >> (exponent - 3)) & 7);
}

/* Returns the class of a size up to max_size. Size 0 has the class of size
 * 1. */
static inline uint32_t size_class_of(const struct size_classes *classes, size_t size) {
    if (__builtin_expect(size <= SIZE_TABLE_BYTES, 1)) {
        return classes->small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM];
    }
    return size_class_above_128(size);
}

#endif
