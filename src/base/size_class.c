#include "base/size_class.h"

#include "base/assert.h"
#include "base/size.h"

/*
 * A CPU cache holds a bounded number of bytes of each class, and a bounded
 * number of small blocks. It always has room for MIN_CACHE_BLOCKS. With pages
 * of 4 KiB, all classes together stay below 1.75 MiB, and grow by at most
 * MAX_GROWN_BYTES.
 */
#define MAX_CACHE_BYTES       ((size_t)16 << 10)
#define MAX_SMALL_CACHE_BYTES ((size_t)32 << 10) /* for classes up to 1 KiB */
#define MAX_GROWN_CLASS_BYTES ((size_t)128 << 10)
#define MAX_SMALL_GROWN_BYTES ((size_t)64 << 10)
#define MIN_CACHE_BLOCKS      2

#define MIN_COARSE_SIZE 64

#define MIN_SLAB_BYTES   ((size_t)16 << 10)
#define GOOD_SLAB_BLOCKS 64
#define MAX_SLAB_BLOCKS  512 /* in slabs of several pages: one cache line of bits */
#define GOOD_SLAB_PAGES  8
#define MAX_SLAB_PAGES   16

/*
 * Returns the smallest number of pages that hold enough blocks to be worth a
 * descriptor, and waste at most a sixteenth at their end. If there is no such
 * number up to MAX_SLAB_BLOCKS blocks, returns the one that wastes the least. A
 * small slab is empty sooner, and then any class can use its pages.
 */
static uint32_t slab_pages_for(size_t size, size_t page_size) {
    uint32_t best = 1;
    size_t best_waste = SIZE_MAX;
    for (uint32_t pages = 1; pages <= MAX_SLAB_PAGES; pages++) {
        size_t bytes = pages * page_size;
        size_t blocks = bytes / size;
        if (blocks == 0) {
            continue;
        }
        if (blocks > MAX_SLAB_BLOCKS && pages > 1) {
            break;
        }
        size_t waste = (bytes % size) * 1024 / bytes;
        if (waste <= best_waste) {
            best = pages;
            best_waste = waste;
        }
        bool enough = bytes >= MIN_SLAB_BYTES && (blocks >= GOOD_SLAB_BLOCKS || pages >= GOOD_SLAB_PAGES);
        if (waste <= 64 && enough) {
            return pages;
        }
    }
    return best;
}

static void fill_class(struct size_class *size_class, size_t size, size_t page_size) {
    size_class->size = (uint32_t)size;
    size_class->inverse = (uint32_t)((((uint64_t)1 << 32) + size - 1) / size);
    size_class->slab_pages = (uint16_t)slab_pages_for(size, page_size);
    size_class->slab_blocks = (uint16_t)(size_class->slab_pages * page_size / size);
    size_t blocks = size <= 64 ? MAX_CACHE_BLOCKS : size <= 128 ? MAX_CACHE_BLOCKS / 2 : MAX_CACHE_BLOCKS / 4;
    size_t bytes = size <= 1024 ? MAX_SMALL_CACHE_BYTES : MAX_CACHE_BYTES;
    size_class->max_cached = (uint16_t)size_min(size_max(bytes / size, MIN_CACHE_BLOCKS), blocks);
    size_t grown_bytes = size <= 1024 ? MAX_SMALL_GROWN_BYTES : MAX_GROWN_CLASS_BYTES;
    size_t grown_blocks = size <= 64 ? MAX_GROWN_BLOCKS : MAX_GROWN_BLOCKS / 2;
    size_class->max_grown =
        (uint16_t)size_min(size_max(grown_bytes / size, size_class->max_cached), grown_blocks);
    size_class->batch = size_class->max_cached / 2;
    calm_assert(size_class->slab_blocks > 0 && size_class->batch > 0, size);
    calm_assert(size_class->max_cached <= MAX_CACHE_BLOCKS && size_class->max_cached <= size_class->max_grown,
                size);
    calm_assert(size_class->max_grown <= MAX_GROWN_BLOCKS, size);
}

/* Returns the class of a size up to SIZE_TABLE_BYTES. */
static uint8_t fine_class(size_t size) {
    return (uint8_t)(size == 0 ? 1 : size <= 128 ? size / SIZE_QUANTUM : size_class_above_128(size));
}

void size_classes_fill(struct size_classes *classes, size_t page_size) {
    size_t max_size = 8 * page_size;
    uint32_t count = 1;
    for (size_t size = SIZE_QUANTUM; size <= 128; size += SIZE_QUANTUM) {
        fill_class(&classes->of[count++], size, page_size);
    }
    for (size_t doubling = 128; doubling < max_size; doubling *= 2) {
        for (size_t step = 1; step <= 8; step++) {
            fill_class(&classes->of[count++], doubling + doubling / 8 * step, page_size);
        }
    }
    classes->count = count;
    calm_assert(count <= SIZE_CLASSES && classes->of[count - 1].size == max_size, count);
    classes->max_size = (uint32_t)max_size;
    classes->max_slab_blocks = 0;
    for (uint32_t i = 1; i < count; i++) {
        classes->max_slab_blocks = (uint32_t)size_max(classes->max_slab_blocks, classes->of[i].slab_blocks);
    }
    for (size_t i = 0; i < SMALL_SIZES; i++) {
        classes->small[i] = fine_class(i * SIZE_QUANTUM);
    }
}

void small_sizes_coarsen(uint8_t *small) {
    size_t power = MIN_COARSE_SIZE;
    for (size_t i = 0; i < SMALL_SIZES; i++) {
        power *= i * SIZE_QUANTUM > power ? 4 : 1;
        small[i] = fine_class(power);
    }
}

/* NOLINTNEXTLINE(readability-non-const-parameter): the builtin writes */
void small_sizes_refine(uint8_t *small) {
    for (size_t i = SMALL_SIZES; i-- > 0;) {
        uint8_t old = __atomic_load_n(&small[i], __ATOMIC_RELAXED);
        if (old != 0) {
            __atomic_compare_exchange_n(&small[i], &old, fine_class(i * SIZE_QUANTUM), false,
                                        __ATOMIC_RELEASE, __ATOMIC_RELAXED);
        }
    }
}
