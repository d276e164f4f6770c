/* Pages as the kernel sees them, and mappings: what tests of memory look at. */
#ifndef CALM_TESTS_PAGES_H
#define CALM_TESTS_PAGES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include "check.h"

#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4 /* glibc 2.32 */
#endif

/* Of the kernel; each test's main function sets it. */
static size_t page_size;

/* Anonymous memory in small pages, as heaps have it where huge pages are not asked for. */
static inline unsigned char *map_pages(size_t pages) {
    void *memory = mmap(NULL, pages * page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    madvise(memory, pages * page_size, MADV_NOHUGEPAGE); /* EINVAL: a kernel without them */
    return memory;
}

/* Whether each byte of a page has this value. */
static inline bool page_holds(const unsigned char *page, unsigned char value) {
    for (size_t i = 0; i < page_size; i++) {
        if (page[i] != value) {
            return false;
        }
    }
    return true;
}

/* The number of pages of a range that are resident. */
static inline size_t resident_pages(const void *start, size_t bytes) {
    static unsigned char resident[32768];
    size_t pages = bytes / page_size;
    CHECK(pages <= sizeof resident);
    CHECK_EQUAL(mincore((void *)(uintptr_t)start, bytes, resident), 0);
    size_t count = 0;
    for (size_t i = 0; i < pages; i++) {
        count += resident[i] & 1;
    }
    return count;
}

/* Whether the kernel tells untouched pages from others. gVisor says of all that they are resident. */
static inline bool residency_is_told(void) {
    void *page = map_pages(1);
    bool told = resident_pages(page, page_size) == 0;
    munmap(page, page_size);
    return told;
}

/* Whether the kernel moves pages and leaves their addresses mapped. gVisor does not. */
static inline bool pages_can_move(void) {
    unsigned char *pages = map_pages(2);
    pages[0] = 1;
    void *moved = mremap(pages, page_size, page_size, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP,
                         pages + page_size);
    munmap(pages, 2 * page_size);
    return moved != MAP_FAILED;
}

/* Whether RLIMIT_DATA counts private mappings. In gVisor it counts the program break only. */
static inline bool data_limit_counts_mappings(void) {
    struct rlimit before;
    CHECK(getrlimit(RLIMIT_DATA, &before) == 0);
    struct rlimit one_page = {page_size, before.rlim_max}; /* 0 may mean no limit, for valgrind */
    CHECK(setrlimit(RLIMIT_DATA, &one_page) == 0);
    void *page = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(setrlimit(RLIMIT_DATA, &before) == 0);
    if (page != MAP_FAILED) {
        munmap(page, page_size);
    }
    return page == MAP_FAILED;
}

/* The number of mappings that a range overlaps, of those whose lines contain a text, or of all. */
static inline size_t count_mappings_with(const void *base, size_t bytes, const char *text) {
    static char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    size_t found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        uintptr_t last = strtoull(end + 1, NULL, 16);
        bool overlaps = first < (uintptr_t)base + bytes && last > (uintptr_t)base;
        found += overlaps && strstr(line, text) != NULL;
    }
    fclose(maps);
    return found;
}

static inline size_t count_mappings(const void *base, size_t bytes) {
    return count_mappings_with(base, bytes, "");
}

#endif
