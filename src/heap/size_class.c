#include "heap/size_class.h"

#include <stdbool.h>

/*
 * What one CPU's cache may hold of a class: so many bytes, but small blocks not without end, and large ones a
 * few. All classes together stay below 1.75 MiB, and grow by no more than GROWN_BYTES_MOST.
 */
#define CACHE_BYTES_MOST       ((size_t)16 << 10)
#define CACHE_BYTES_MOST_SMALL ((size_t)32 << 10) /* of a class of up to a KiB */
#define GROWN_CLASS_BYTES      ((size_t)128 << 10)
#define CACHE_BLOCKS_LEAST     2

#define SLAB_BYTES_LEAST   ((size_t)16 << 10)
#define SLAB_BLOCKS_SOUGHT 64
#define SLAB_BLOCKS_MOST   512 /* as many bits as fill a descriptor's second cache line */
#define SLAB_PAGES_ENOUGH  8
#define SLAB_PAGES_MOST    16

/*
 * The fewest pages that hold enough blocks to be worth a descriptor, and waste at most a sixteenth at their
 * end. Small slabs keep free pages within the reach of all classes.
 */
static uint32_t slab_pages_for(size_t size, size_t page_size) {
    uint32_t best = 1;
    size_t best_waste = SIZE_MAX;
    for (uint32_t pages = 1; pages <= SLAB_PAGES_MOST; pages++) {
        size_t bytes = pages * page_size;
        size_t blocks = bytes / size;
        if (blocks == 0) {
            continue;
        }
        if (blocks > SLAB_BLOCKS_MOST && pages > 1) {
            break;
        }
        size_t waste = (bytes % size) * 1024 / bytes;
        if (waste <= best_waste) {
            best = pages;
            best_waste = waste;
        }
        bool enough =
            bytes >= SLAB_BYTES_LEAST && (blocks >= SLAB_BLOCKS_SOUGHT || pages >= SLAB_PAGES_ENOUGH);
        if (waste <= 64 && enough) {
            return pages;
        }
    }
    return best;
}

static void fill_class(struct size_class *class, size_t size, size_t page_size) {
    class->size = (uint32_t)size;
    class->inverse = (uint32_t)((((uint64_t)1 << 32) + size - 1) / size);
    class->slab_pages = (uint16_t)slab_pages_for(size, page_size);
    class->slab_blocks = (uint16_t)(class->slab_pages * page_size / size);
    size_t blocks_most = size <= 64    ? CACHE_BLOCKS_MOST
                         : size <= 128 ? CACHE_BLOCKS_MOST / 2
                                       : CACHE_BLOCKS_MOST / 4;
    size_t most = (size <= 1024 ? CACHE_BYTES_MOST_SMALL : CACHE_BYTES_MOST) / size;
    most = most > blocks_most ? blocks_most : most < CACHE_BLOCKS_LEAST ? CACHE_BLOCKS_LEAST : most;
    class->cache_most = (uint16_t)most;
    size_t grown_blocks = size <= 128 ? GROWN_BLOCKS_MOST : GROWN_BLOCKS_MOST / 8;
    size_t grown = GROWN_CLASS_BYTES / size;
    grown = grown > grown_blocks ? grown_blocks : grown;
    class->grown_most = (uint16_t)(grown > most ? grown : most);
    class->batch = (uint16_t)(most / 2);
}

void size_classes_fill(struct size_classes *classes, size_t page_size) {
    size_t most = 8 * page_size;
    uint32_t count = 1;
    for (size_t size = SIZE_QUANTUM; size <= 128; size += SIZE_QUANTUM) {
        fill_class(&classes->of[count++], size, page_size);
    }
    for (size_t doubling = 128; doubling < most; doubling *= 2) {
        for (size_t step = 1; step <= 8; step++) {
            fill_class(&classes->of[count++], doubling + doubling / 8 * step, page_size);
        }
    }
    classes->count = count;
    classes->size_most = (uint32_t)most;
    classes->blocks_most = 0;
    for (uint32_t i = 1; i < count; i++) {
        if (classes->of[i].slab_blocks > classes->blocks_most) {
            classes->blocks_most = classes->of[i].slab_blocks;
        }
    }
    for (size_t i = 0; i <= SIZE_TABLE_BYTES / SIZE_QUANTUM; i++) {
        size_t size = i * SIZE_QUANTUM;
        classes->small[i] = (uint8_t)(size == 0     ? 1
                                      : size <= 128 ? size / SIZE_QUANTUM
                                                    : size_class_above_128(size));
    }
}
