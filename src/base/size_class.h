/*
 * Size classes. They are 16 bytes apart up to 128 bytes. Above 128 bytes, there
 * are eight for each doubling, so less than an eighth of a block is waste.
 * Class 0 means that a size has no class. Pure. The tables are filled once for
 * the kernel's page size. Then all threads read them.
 *
 * Each class has pages of its own. So that a program that allocates few blocks
 * touches few pages, the table of small sizes may be coarse: blocks up to 1 KiB
 * then have powers of two as sizes. Any thread may make the table fine while
 * others read it, as each entry is right at any time.
 */
#ifndef CALM_HEAP_SIZE_CLASS_H
#define CALM_HEAP_SIZE_CLASS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIZE_QUANTUM     16
#define SIZE_CLASSES     108 /* enough for slabs of 64 KiB pages */
#define SIZE_TABLE_BYTES 1024
#define SMALL_SIZES      (SIZE_TABLE_BYTES / SIZE_QUANTUM + 1)
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
    uint8_t small[SMALL_SIZES]; /* the class of each (size + 15) / 16 */
};

/* Reads a byte or word that another thread may be writing. An aligned read is
 * atomic on these processors. If it is declared atomic, compilers spend one
 * instruction more, so only ThreadSanitizer gets the declaration. */
#if defined(__SANITIZE_THREAD__)
#define FAST_READ(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#else
#define FAST_READ(word) (word)
#endif

/* The table of small sizes is fine. */
void size_classes_fill(struct size_classes *classes, size_t page_size);

/* Makes a table of small sizes coarse. */
void small_sizes_coarsen(uint8_t *small);
/* Makes it fine, from the last entry to the first, which tells the two kinds of
 * tables apart. Entries that are 0 stay 0. */
void small_sizes_refine(uint8_t *small);

static inline bool small_sizes_are_coarse(const uint8_t *small) {
    return FAST_READ(small[0]) > 1;
}

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
        return FAST_READ(classes->small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM]);
    }
    return size_class_above_128(size);
}

#endif
