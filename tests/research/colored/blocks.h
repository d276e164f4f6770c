/* Blocks for the tests of colored memory: of the machine's own pages, for a cache that files describe. */
#ifndef CALM_TESTS_BLOCKS_H
#define CALM_TESTS_BLOCKS_H

#include "colored/colored.h"

#include "colored/pagemap.h"
#include "os/vm.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "check.h"
#include "machine_files.h"
#include "pages.h"

#define KEPT_ERRNO 1234 /* none of the system's */

enum { COLORS = 8, WAYS = 8, COLORS_NOT_TIMED = 128 };

/* Beside the one at root: has the caches, but little memory, and no pagemap or an empty one. */
static char poor_root[] = "/tmp/calm-test-colored-XXXXXX";
static size_t page_bytes;

/* ---- machines of files ---- */

static inline void put_data_cache(const char *machine, unsigned level, size_t bytes, unsigned ways) {
    char level_text[16];
    char size[32];
    char ways_text[16];
    snprintf(level_text, sizeof level_text, "%u\n", level);
    snprintf(size, sizeof size, "%zuK\n", bytes >> 10);
    snprintf(ways_text, sizeof ways_text, "%u\n", ways);
    put_cache_at(machine, level - 1, level_text, level == 1 ? "Data\n" : "Unified\n", size, ways_text, "0\n");
}

static inline void make_machine(char *machine) {
    CHECK(mkdtemp(machine) != NULL);
    CHECK(chmod(machine, 0755) == 0);                             /* for tests that give up root */
    put_data_cache(machine, 1, WAYS * page_bytes, WAYS);          /* one color */
    put_data_cache(machine, 2, WAYS * COLORS * page_bytes, WAYS); /* what these tests are about */
    put_data_cache(machine, 3, WAYS * 3 * page_bytes, WAYS);      /* sets that are no power of two */
    put_data_cache(machine, 4, WAYS * COLORS_NOT_TIMED * page_bytes, WAYS);
}

/* Where every page is in no frame. */
static inline void put_empty_pagemap(const char *machine) {
    char path[128];
    snprintf(path, sizeof path, "%s/proc/self/pagemap", machine);
    CHECK(unlink(path) == 0 || errno == ENOENT);
    put_at(machine, "", "/proc/self/pagemap");
    CHECK(truncate(path, (off_t)1 << 39) == 0);
}

static inline void put_memory(const char *machine, size_t bytes) {
    char text[64];
    snprintf(text, sizeof text, "MemAvailable:   %zu kB\n", bytes >> 10);
    put_at(machine, text, "/proc/meminfo");
}

static inline void remove_machine(const char *machine) {
    clear_machine_at(machine);
    CHECK(rmdir(machine) == 0);
}

/* Both; that at root has this machine's /proc. */
static inline void make_machines(void) {
    char link[64];
    page_bytes = page_size = vm_page_size();
    make_machine(root);
    make_machine(poor_root);
    snprintf(link, sizeof link, "%s/proc", root);
    CHECK(symlink("/proc", link) == 0);
}

static inline void remove_machines(void) {
    remove_machine(root);
    remove_machine(poor_root);
}

/* Whether the kernel has page maps. gVisor does not. */
static inline bool has_pagemap(void) {
    return access("/proc/self/pagemap", F_OK) == 0;
}

/* Whether the kernel shows this process which frames its pages are in. Says so if it does not. */
static inline bool frames_are_shown(void) {
    uint64_t frame;
    int error = pagemap_frames("", root - (uintptr_t)root % page_bytes, 1, &frame);
    CHECK(error == 0 || error == (has_pagemap() ? EPERM : ENOENT));
    if (error != 0) {
        puts("left out: the kernel hides frames from this process");
    }
    return error == 0;
}

/* ---- what is seen from outside ---- */

/* Mappings that lie in the range, and whether any of it is none. */
static inline size_t mappings_of(const void *block, size_t bytes) {
    uintptr_t start = (uintptr_t)block;
    size_t count = 0;
    char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long from;
        unsigned long to;
        if (sscanf(line, "%lx-%lx", &from, &to) == 2) {
            count += from < start + bytes && to > start;
        }
    }
    CHECK(fclose(maps) == 0);
    return count;
}

static inline unsigned color_now(const char *page) {
    uint64_t entry = 0;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    CHECK(pread(file, &entry, sizeof entry, (off_t)((uintptr_t)page / page_bytes * sizeof entry)) ==
          sizeof entry);
    CHECK(close(file) == 0);
    CHECK(entry >> 63 == 1);
    return (unsigned)((entry & (((uint64_t)1 << 55) - 1)) % COLORS);
}

static inline char *take_from(const char *where, size_t bytes, unsigned cache) {
    void *block = NULL;
    errno = KEPT_ERRNO;
    int error = colored_alloc(where, bytes, cache, &block);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    if (error != 0) {
        fprintf(stderr, "%s\n", strerror(error));
    }
    CHECK(error == 0 && block != NULL);
    return block;
}

static inline char *take(size_t bytes, unsigned cache) {
    return take_from(root, bytes, cache);
}

static inline int why_not(const char *where, size_t bytes, unsigned cache) {
    void *block = NULL;
    errno = KEPT_ERRNO;
    int error = colored_alloc(where, bytes, cache, &block);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(block == NULL && error != 0);
    return error;
}

static inline struct calm_colored stats_of(const void *block) {
    struct calm_colored stats;
    CHECK(calm_colored_stats(block, &stats, sizeof stats) == 0);
    return stats;
}

#endif
