/* The size classes for every page size of a kernel: which sizes fit, the waste, and the tables. */
#include "base/size_class.h"
#include "cache/cpu_cache.h"
#include "cache/depot.h"
#include "heap/space.h"

#include "check.h"

#include <string.h>

static struct size_classes classes;
static size_t page_size;

static void test_every_size(void) {
    uint32_t last = 1;
    for (size_t size = 0; size <= classes.max_size; size++) {
        uint32_t size_class = size_class_of(&classes, size);
        CHECK(size_class >= 1 && size_class < classes.count);
        size_t usable = classes.of[size_class].size;
        CHECK(usable >= size);
        /* The smallest that fits. */
        CHECK(size_class == 1 || classes.of[size_class - 1].size < size);
        CHECK(size_class == last || size_class == last + 1);
        if (size > 128) {
            CHECK((usable - size) * 8 < usable);
            CHECK_EQUAL(size_class, size_class_above_128(size));
        } else {
            CHECK(usable - size <= SIZE_QUANTUM);
        }
        if (size <= SIZE_TABLE_BYTES) {
            CHECK_EQUAL(classes.small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM], size_class);
        }
        last = size_class;
    }
    CHECK_EQUAL(last, classes.count - 1);
    CHECK_EQUAL(classes.of[last].size, classes.max_size);
    CHECK_EQUAL(classes.max_size, 8 * page_size);
}

/* A block is numbered by its first byte, and by its last. */
static void check_inverse(const struct size_class *size_class) {
    for (size_t block = 0; block <= size_class->slab_blocks; block++) {
        CHECK_EQUAL(size_class_block_at(size_class, block * size_class->size), block);
        CHECK_EQUAL(size_class_block_at(size_class, (block + 1) * size_class->size - 1), block);
        CHECK_EQUAL(size_class_block_at(size_class, block * size_class->size + size_class->size / 2), block);
    }
}

static void test_every_class(void) {
    CHECK(classes.count <= SIZE_CLASSES);
    CHECK(classes.count <= UINT8_MAX + 1U);
    CHECK_EQUAL(classes.of[0].size, 0);
    uint32_t max_slab_blocks = 0;
    for (uint32_t i = 1; i < classes.count; i++) {
        const struct size_class *size_class = &classes.of[i];
        CHECK(size_class->size > classes.of[i - 1].size);
        CHECK_EQUAL(size_class->size % SIZE_QUANTUM, 0);
        CHECK_EQUAL(size_class->inverse, (((uint64_t)1 << 32) + size_class->size - 1) / size_class->size);
        size_t bytes = size_class->slab_pages * page_size;
        CHECK_EQUAL(size_class->slab_blocks, bytes / size_class->size);
        CHECK(size_class->slab_blocks >= 1 && size_class->slab_pages >= 1);
        CHECK(bytes % size_class->size * 16 <= bytes); /* waste at its end */
        /* What is counted in 16 bits fits: blocks of a slab, and blocks on one page beside PAGE_DIRTY. */
        CHECK(page_size / size_class->size + 2 <= PAGE_USERS);
        max_slab_blocks =
            size_class->slab_blocks > max_slab_blocks ? size_class->slab_blocks : max_slab_blocks;
        check_inverse(size_class);
    }
    CHECK_EQUAL(classes.max_slab_blocks, max_slab_blocks);
}

/* Any power of two up to a page is a class, so that what is aligned to one needs no pages of its own. */
static void test_powers_of_two(void) {
    for (size_t size = SIZE_QUANTUM; size <= classes.max_size; size *= 2) {
        CHECK_EQUAL(classes.of[size_class_of(&classes, size)].size, size);
    }
}

/* The fast path of aligned blocks relies on it. */
static void test_multiples_of_alignments(void) {
    for (size_t alignment = SIZE_QUANTUM; alignment <= SIZE_TABLE_BYTES; alignment *= 2) {
        for (size_t size = alignment; size <= SIZE_TABLE_BYTES; size += alignment) {
            CHECK_EQUAL(classes.of[size_class_of(&classes, size)].size % alignment, 0);
        }
    }
}

/* The coarse table: few classes, and the alignments as before. A fine one replaces it, but for entries that
 * are switched off. */
static void test_coarse_table(void) {
    struct size_classes fine = classes;
    CHECK(!small_sizes_are_coarse(classes.small));
    small_sizes_coarsen(classes.small);
    CHECK(small_sizes_are_coarse(classes.small));
    static const size_t sizes[] = {64, 256, 1024};
    size_t number = 0;
    for (size_t size = 0; size <= SIZE_TABLE_BYTES; size += SIZE_QUANTUM) {
        number += size > sizes[number];
        CHECK_EQUAL(classes.of[size_class_of(&classes, size)].size, sizes[number]);
    }
    test_multiples_of_alignments();
    classes.small[2] = 0;
    small_sizes_refine(classes.small);
    CHECK_EQUAL(classes.small[2], 0);
    classes.small[2] = fine.small[2];
    CHECK(memcmp(classes.small, fine.small, sizeof fine.small) == 0);
}

static void test_caches(void) {
    size_t words = 3 * SIZE_CLASSES;
    size_t bytes = 0;
    for (uint32_t i = 1; i < classes.count; i++) {
        const struct size_class *size_class = &classes.of[i];
        CHECK(size_class->max_cached >= 2 && size_class->max_cached <= MAX_CACHE_BLOCKS);
        CHECK(size_class->batch >= 1 && size_class->batch + 1 <= MAX_MAGAZINE_BLOCKS);
        CHECK(size_class->batch * 2 <= size_class->max_cached);
        CHECK(size_class->max_cached <= classes.of[i > 1 ? i - 1 : 1].max_cached);
        CHECK(size_class->max_grown >= size_class->max_cached && size_class->max_grown <= MAX_GROWN_BLOCKS);
        /* A place at first, and one to grow in; below each, a word that is never written. */
        words += 1 + size_class->max_cached + 1 + size_class->max_grown;
        bytes += (size_t)size_class->max_cached * size_class->size;
    }
    CHECK(words <= CPU_CACHE_BYTES / 8 && words <= UINT16_MAX); /* start_of */
    printf("pages of %zu KiB: %u classes, %zu words and at most %zu KiB in a region\n", page_size >> 10,
           classes.count - 1, words, bytes >> 10);
    CHECK(page_size > 4096 || bytes <= (size_t)1792 << 10);
}

int main(void) {
    for (page_size = 4096; page_size <= 65536; page_size *= 4) {
        classes = (struct size_classes){0};
        size_classes_fill(&classes, page_size);
        test_every_size();
        test_every_class();
        test_powers_of_two();
        test_multiples_of_alignments();
        test_coarse_table();
        test_caches();
    }
    return 0;
}
