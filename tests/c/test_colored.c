/*
 * Colored memory, on the machine's own pages and a cache described by files.
 *
 * Checks that need frame numbers are skipped, with a message, if the kernel hides them.
 */
#include "colored/colored.h"

#include "calmalloc.h"
#include "colored/eviction.h"
#include "colored/page_mover.h"
#include "colored/pagemap.h"
#include "os/cgroup.h"
#include "os/mman.h"
#include "os/random.h"
#include "os/vm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>

#include "check.h"
#include "machine_files.h"
#include "test_clock.h"

#define KEPT_ERRNO 1234 /* none of the system's */

enum { COLORS = 8, WAYS = 8, COLORS_NOT_TIMED = 128 };

/* Beside the one at root: has the caches, but little memory, and no pagemap or an empty one. */
static char poor_root[] = "/tmp/calm-test-colored-XXXXXX";
static size_t page_bytes;
static bool frames_are_shown;

/* ---- a cache that is simulated ---- */

bool __real_eviction_can_time(void);
bool __wrap_eviction_can_time(void);
bool __real_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors);
bool __wrap_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors);
bool __real_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);
bool __wrap_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count);

/* NULL: the machine's own is timed. Else the color of a page by its frame, of which the cache has as many as
 * ways. */
static size_t (*simulated)(uint64_t frame);
static size_t times_opened;
static uint64_t *simulated_frames; /* of the surplus */

static size_t by_frame(uint64_t frame) {
    return frame % COLORS;
}

/* As behind a hypervisor that deals out its own frames. */
static size_t by_another_number(uint64_t frame) {
    return random_mix(frame) % COLORS;
}

/* A page of its own color each: none drives another out. */
static size_t by_none(uint64_t frame) {
    return frame;
}

bool __wrap_eviction_can_time(void) {
    return simulated != NULL || __real_eviction_can_time();
}

bool __wrap_eviction_open(struct eviction *eviction, const void *base, size_t pages, size_t bytes_of_page,
                          const struct hardware_cache *cache, size_t colors) {
    times_opened++;
    if (simulated == NULL) {
        return __real_eviction_open(eviction, base, pages, bytes_of_page, cache, colors);
    }
    free(simulated_frames);
    simulated_frames = calloc(pages, sizeof *simulated_frames);
    CHECK(simulated_frames != NULL);
    CHECK_EQUAL(pagemap_frames("", base, pages, simulated_frames), 0);
    return true;
}

bool __wrap_eviction_evicts(void *eviction, uint32_t page, const uint32_t *walked, size_t count) {
    if (simulated == NULL) {
        return __real_eviction_evicts(eviction, page, walked, count);
    }
    size_t fighting = 0;
    for (size_t i = 0; i < count; i++) {
        fighting += simulated(simulated_frames[walked[i]]) == simulated(simulated_frames[page]);
    }
    return fighting >= WAYS;
}

/* ---- a control group that is short of memory ---- */

uint64_t __real_cgroup_available_bytes(const char *where, uint64_t *limit);
uint64_t __wrap_cgroup_available_bytes(const char *where, uint64_t *limit);

static bool group_is_short;

uint64_t __wrap_cgroup_available_bytes(const char *where, uint64_t *limit) {
    return group_is_short ? 0 : __real_cgroup_available_bytes(where, limit);
}

/* ---- machines of files ---- */

static void put_data_cache(const char *machine, unsigned level, size_t bytes, unsigned ways) {
    char level_text[16];
    char size[32];
    char ways_text[16];
    snprintf(level_text, sizeof level_text, "%u\n", level);
    snprintf(size, sizeof size, "%zuK\n", bytes >> 10);
    snprintf(ways_text, sizeof ways_text, "%u\n", ways);
    put_cache_at(machine, level - 1, level_text, level == 1 ? "Data\n" : "Unified\n", size, ways_text, "0\n");
}

static void make_machine(char *machine) {
    CHECK(mkdtemp(machine) != NULL);
    CHECK(chmod(machine, 0755) == 0);                             /* for tests that give up root */
    put_data_cache(machine, 1, WAYS * page_bytes, WAYS);          /* one color */
    put_data_cache(machine, 2, WAYS * COLORS * page_bytes, WAYS); /* what these tests are about */
    put_data_cache(machine, 3, WAYS * 3 * page_bytes, WAYS);      /* sets that are no power of two */
    put_data_cache(machine, 4, WAYS * COLORS_NOT_TIMED * page_bytes, WAYS);
}

/* Where every page is in no frame. */
static void put_empty_pagemap(const char *machine) {
    char path[128];
    put_at(machine, "", "/proc/self/pagemap");
    snprintf(path, sizeof path, "%s/proc/self/pagemap", machine);
    CHECK(truncate(path, (off_t)1 << 39) == 0);
}

static void put_empty_pagemap_anew(const char *machine) {
    char path[128];
    snprintf(path, sizeof path, "%s/proc/self/pagemap", machine);
    CHECK(unlink(path) == 0 || errno == ENOENT);
    put_empty_pagemap(machine);
}

static void put_memory(const char *machine, size_t bytes) {
    char text[64];
    snprintf(text, sizeof text, "MemAvailable:   %zu kB\n", bytes >> 10);
    put_at(machine, text, "/proc/meminfo");
}

static void remove_machine(const char *machine) {
    clear_machine_at(machine);
    CHECK(rmdir(machine) == 0);
}

/* ---- what is seen from outside ---- */

/* Mappings that lie in the range, and whether any of it is none. */
static size_t mappings_of(const void *block, size_t bytes) {
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

static size_t all_mappings(void) {
    return mappings_of((void *)page_bytes, SIZE_MAX / 2);
}

static unsigned color_now(const char *page) {
    uint64_t entry = 0;
    int file = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    CHECK(file >= 0);
    CHECK(pread(file, &entry, sizeof entry, (off_t)((uintptr_t)page / page_bytes * sizeof entry)) ==
          sizeof entry);
    CHECK(close(file) == 0);
    CHECK(entry >> 63 == 1);
    return (unsigned)((entry & (((uint64_t)1 << 55) - 1)) % COLORS);
}

static char *take_from(const char *where, size_t bytes, unsigned cache) {
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

static char *take(size_t bytes, unsigned cache) {
    return take_from(root, bytes, cache);
}

static int why_not(const char *where, size_t bytes, unsigned cache) {
    void *block = NULL;
    errno = KEPT_ERRNO;
    int error = colored_alloc(where, bytes, cache, &block);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(block == NULL && error != 0);
    return error;
}

static struct calm_colored stats_of(const void *block) {
    struct calm_colored stats;
    CHECK(calm_colored_stats(block, &stats, sizeof stats) == 0);
    return stats;
}

/* Address space of the process. */
static size_t pages_reserved(void) {
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "re");
    CHECK(file != NULL);
    CHECK(fscanf(file, "%zu", &pages) == 1);
    CHECK(fclose(file) == 0);
    return pages;
}

/* Blocks of which check_block was asked, and those in which every page has its color. */
static size_t blocks_checked;
static size_t blocks_whole;

/* A block that is all that it should be. */
static void check_block(char *block, size_t bytes) {
    struct calm_colored stats = stats_of(block);
    size_t pages = (bytes + page_bytes - 1) / page_bytes;
    size_t misplaced = 0;
    CHECK((uintptr_t)block % page_bytes == 0);
    for (size_t i = 0; i < bytes; i++) {
        CHECK(block[i] == 0);
    }
    for (size_t i = 0; i < pages; i++) {
        block[i * page_bytes] = 1;
        misplaced += color_now(block + i * page_bytes) != (stats.first_color + i) % COLORS;
    }
    CHECK_EQUAL(stats.version, CALM_COLORED_VERSION);
    CHECK_EQUAL(stats.size, sizeof stats);
    CHECK_EQUAL(stats.level, 2);
    CHECK_EQUAL(stats.colors, COLORS);
    CHECK_EQUAL(stats.source, CALM_COLORED_FRAMES);
    CHECK_EQUAL(stats.pages, pages);
    CHECK_EQUAL(stats.pages_misplaced, misplaced);
    CHECK(stats.pages_examined > pages && stats.pages_examined <= 4 * pages + 16 * COLORS);
    /* With more than four of eight colors for each that is wanted, one is missing only if the kernel happens
     * to give few pages of it: then as many were looked at as may be. */
    CHECK(misplaced == 0 || stats.pages_examined == 4 * pages + 16 * COLORS);
    CHECK(misplaced > 0 || stats.pages_crowded == 0);
    blocks_checked++;
    blocks_whole += misplaced == 0;
}

/* ---- the tests ---- */

static void test_errors(void) {
    CHECK_EQUAL(why_not(root, 0, 2), EINVAL);
    CHECK_EQUAL(why_not(root, 1, 0), EINVAL);
    CHECK_EQUAL(why_not(root, 1, CALM_COLORED_FRAMES), EINVAL);
    CHECK_EQUAL(why_not(root, 1, 2 | CALM_COLORED_FRAMES | CALM_COLORED_TIMED), EINVAL);
    CHECK_EQUAL(why_not(root, 1, 256 << 2 | 2), EINVAL);
    CHECK_EQUAL(why_not(root, 1, 1), ENOTSUP);
    CHECK_EQUAL(why_not(root, 1, 3), ENOTSUP);
    CHECK_EQUAL(why_not(root, 1, 5), ENOTSUP);
    CHECK_EQUAL(why_not(root, 1, 255), ENOTSUP);
    CHECK_EQUAL(why_not("/nowhere", 1, 2), ENOTSUP);
    CHECK_EQUAL(why_not(root, SIZE_MAX, 2), ENOMEM);
    CHECK_EQUAL(why_not(root, SIZE_MAX / 2, 2), ENOMEM);

    put_memory(poor_root, (size_t)1000000 << 10);
    CHECK_EQUAL(why_not(poor_root, 1, 2 | CALM_COLORED_FRAMES), ENOTSUP); /* there is no pagemap */
    CHECK_EQUAL(why_not(poor_root, 1, 4), ENOTSUP);                       /* nor can it be timed */
    put_empty_pagemap(poor_root);
    put_memory(poor_root, 16 * page_bytes);
    CHECK_EQUAL(why_not(poor_root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    CHECK_EQUAL(why_not(poor_root, page_bytes, 2 | CALM_COLORED_TIMED),
                eviction_can_time() ? ENOMEM : ENOTSUP);
    CHECK_EQUAL(why_not(poor_root, page_bytes, 2), ENOMEM);
    /* Before there is a surplus. */
    CHECK_EQUAL(why_not(poor_root, page_bytes, 4 | CALM_COLORED_TIMED), ENOTSUP);

    struct calm_colored stats;
    errno = 0;
    CHECK(calm_colored_alloc(0, 2) == NULL && errno == EINVAL);
    errno = 0;
    CHECK(calm_colored_stats(&stats, &stats, sizeof stats) == -1 && errno == EINVAL);
    errno = 0;
    CHECK(calm_colored_stats(NULL, &stats, sizeof stats) == -1 && errno == EINVAL);
    errno = 0;
    CHECK(calm_colored_stats((void *)1, &stats, sizeof stats) == -1 && errno == EINVAL);
    calm_colored_free(NULL);
}

static void test_pagemap(void) {
    uint64_t frames[3] = {0, 0, 0};
    char *pages = mmap(NULL, 3 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    pages[0] = pages[2 * page_bytes] = 1;
    errno = KEPT_ERRNO;
    int error = pagemap_frames("", pages, 3, frames);
    CHECK_EQUAL(pagemap_frames("/nowhere", pages, 3, frames), ENOENT);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(error == 0 || error == EPERM);
    if (error == 0) {
        CHECK_EQUAL(pagemap_frames("", pages, 3, frames), 0);
        CHECK(frames[0] != PAGEMAP_ABSENT && frames[2] != PAGEMAP_ABSENT && frames[0] != frames[2]);
        CHECK_EQUAL(frames[1], PAGEMAP_ABSENT);
        CHECK_EQUAL(frames[0] % COLORS, color_now(pages));
    }
    frames_are_shown = error == 0;
    CHECK(munmap(pages, 3 * page_bytes) == 0);
}

/* Paths of files that no path can name. */
static void test_a_root_that_is_too_long(void) {
    static char name[5000];
    uint64_t frame;
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    for (size_t length = 4000; length < sizeof name; length++) {
        name[length - 1] = 'a';
        if (length == 4000) {
            memset(name, 'a', length);
            name[0] = '/';
        }
        CHECK_EQUAL(pagemap_frames(name, NULL, 1, &frame), ENAMETOOLONG);
        CHECK_EQUAL(hardware_caches_read(name, caches, MAX_HARDWARE_CACHES), 0);
    }
}

/* A pagemap's entries for the pages from one that is nowhere. */
static void test_entries(void) {
    const uint64_t present = (uint64_t)1 << 63;
    const uint64_t flags = (uint64_t)1 << 61 | (uint64_t)1 << 55;
    const uint64_t largest = ((uint64_t)1 << 55) - 1;
    const uint64_t some[] = {present | 5, 0, present, present | flags | largest, flags | 3};
    const uint64_t hidden[] = {present, 0, present | flags, present, present};
    const void *start = (const void *)(16 * page_bytes);
    uint64_t frames[6];
    char path[128];
    snprintf(path, sizeof path, "%s/proc/self/pagemap", poor_root);
    put_at(poor_root, "", "/proc/self/pagemap");
    int file = open(path, O_RDWR | O_CLOEXEC);
    CHECK(file >= 0);
    CHECK(pwrite(file, some, sizeof some, 16 * sizeof *some) == sizeof some);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 5, frames), 0);
    CHECK_EQUAL(frames[0], 5);
    CHECK_EQUAL(frames[1], PAGEMAP_ABSENT);
    CHECK_EQUAL(frames[2], 0); /* the first frame of the machine, as others are shown */
    CHECK_EQUAL(frames[3], largest);
    CHECK_EQUAL(frames[4], PAGEMAP_ABSENT);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 6, frames), EIO); /* it ends before */
    CHECK(pwrite(file, hidden, sizeof hidden, 16 * sizeof *hidden) == sizeof hidden);
    CHECK_EQUAL(pagemap_frames(poor_root, start, 5, frames), EPERM);
    CHECK_EQUAL(pagemap_frames(poor_root, (const char *)start + page_bytes, 1, frames), 0);
    CHECK(close(file) == 0);
    CHECK(unlink(path) == 0);
}

static void give_up_root(void) {
    if (geteuid() == 0) {
        CHECK(setuid(65534) == 0);
    }
}

static void test_frames_that_are_hidden(void) {
    give_up_root();
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), EPERM);
    CHECK_EQUAL(why_not(root, page_bytes, 4), EPERM); /* which only frames would do for */
    /* A file that can be opened, and shows nothing. */
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), EPERM);
    CHECK_EQUAL(why_not(root, page_bytes, 4), EPERM);
    errno = 0;
    struct calm_colored stats;
    CHECK(calm_colored_stats(root, &stats, sizeof stats) == -1 && errno == EINVAL);
}

/* That is known by one page, before there is memory for more. */
static void test_frames_that_are_hidden_cost_nothing(void) {
    char path[128];
    snprintf(path, sizeof path, "%s/proc/self/pagemap", poor_root);
    CHECK(unlink(path) == 0);
    CHECK(symlink("/proc/self/pagemap", path) == 0);
    put_memory(poor_root, 16 * page_bytes);
    give_up_root();
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    CHECK_EQUAL(why_not(poor_root, 100 * page_bytes, 2 | CALM_COLORED_FRAMES), EPERM);
}

/* Enough for a first choice, of pages in no frame, and not for the largest surplus: what was chosen is kept,
 * and said to be bad. */
static void test_memory_that_ends_midway(void) {
    enum { PAGES = 64, FIRST = PAGES + PAGES / 4 + 4 * COLORS };
    put_memory(poor_root, 2 * FIRST * page_bytes);
    give_up_root();
    char *block = take_from(poor_root, PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    struct calm_colored stats = stats_of(block);
    CHECK(stats.pages_examined >= FIRST && stats.pages_examined < 4 * PAGES + 16 * COLORS);
    CHECK_EQUAL(stats.pages_misplaced, PAGES);
    for (size_t i = 0; i < PAGES * page_bytes; i++) {
        CHECK(block[i] == 0);
    }
    calm_colored_free(block);
}

/* With memory enough, as much as may be is looked at. */
static void test_what_is_not_found(void) {
    put_memory(poor_root, (size_t)1 << 40);
    char *block = take_from(poor_root, 64 * page_bytes, 2 | CALM_COLORED_FRAMES);
    CHECK_EQUAL(stats_of(block).pages_examined, 4 * 64 + 16 * COLORS);
    calm_colored_free(block);
}

/* Frames are all there is where nothing can be timed. */
static void test_frames_by_default(void) {
    char *block = take(page_bytes, 4);
    struct calm_colored stats = stats_of(block);
    CHECK_EQUAL(stats.source, CALM_COLORED_FRAMES);
    CHECK_EQUAL(stats.colors, COLORS_NOT_TIMED);
    calm_colored_free(block);
}

static void test_blocks(void) {
    static const size_t sizes[] = {1, 4096, 100000, (size_t)1 << 20, ((size_t)4 << 20) + 1};
    check_block(take(page_bytes, 2 | CALM_COLORED_FRAMES), page_bytes); /* what the first leaves, stays */
    size_t before = all_mappings();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        char *block = take(sizes[i], 2 | CALM_COLORED_FRAMES);
        check_block(block, sizes[i]);
        calm_colored_free(block);
        CHECK_EQUAL(mappings_of(block, sizes[i]), 0);
    }
    CHECK(all_mappings() <= before + 1); /* the reader's own */

    char *block = take(page_bytes, 2 | CALM_COLORED_FRAMES);
    struct calm_colored stats;
    errno = 0;
    CHECK(calm_colored_stats(block, NULL, sizeof stats) == -1 && errno == EINVAL);
    CHECK(calm_colored_stats(block, &stats, 4) == -1);
    stats.level = 77;
    CHECK(calm_colored_stats(block, &stats, offsetof(struct calm_colored, level)) == 0);
    CHECK_EQUAL(stats.size, offsetof(struct calm_colored, level));
    CHECK_EQUAL(stats.level, 77);
    calm_colored_free(block);
    CHECK(calm_colored_stats(block, &stats, sizeof stats) == -1);
    CHECK(2 * blocks_whole > blocks_checked);
}

/* While it lives a block takes its own pages, and nothing of what made it. */
static void test_what_is_left(void) {
    enum { PAGES = 64 };
    calm_colored_free(take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES));
    size_t before = pages_reserved();
    int file = dup(0);
    CHECK(file >= 0 && close(file) == 0);
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    CHECK_EQUAL(pages_reserved(), before + PAGES + 2); /* with its guards */
    int file_now = dup(0);
    CHECK(file_now == file && close(file_now) == 0);
    calm_colored_free(block);
    CHECK_EQUAL(pages_reserved(), before);
}

/* A quarter more than is wanted, and a few, are enough most of the time. */
static void test_few_are_examined(void) {
    size_t few = 0;
    for (size_t i = 0; i < 20; i++) {
        char *block = take(page_bytes, 2 | CALM_COLORED_FRAMES);
        few += stats_of(block).pages_examined <= 1 + 4 * COLORS;
        calm_colored_free(block);
    }
    CHECK(few > 0); /* of 33 pages none is of the color once in 80 times */
}

/* Whose page is another now is told. */
static void test_what_is_moved_later(void) {
    enum { PAGES = 1100 };
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    CHECK_EQUAL(stats_of(block).pages_misplaced, 0);
    CHECK(madvise(block, PAGES * page_bytes, MADV_DONTNEED) == 0);
    CHECK_EQUAL(stats_of(block).pages_misplaced, PAGES);
    calm_colored_free(block);
}

static void test_blocks_begin_apart(void) {
    char *blocks[COLORS];
    unsigned seen = 0;
    for (size_t i = 0; i < COLORS; i++) {
        blocks[i] = take(page_bytes, 2 | CALM_COLORED_FRAMES);
        seen |= 1U << color_now(blocks[i]);
    }
    CHECK_EQUAL(seen, (1U << COLORS) - 1);
    for (size_t i = 0; i < COLORS; i++) {
        calm_colored_free(blocks[i]);
    }
    /* Of more colors as well. */
    unsigned firsts[16];
    for (size_t i = 0; i < 16; i++) {
        char *block = take(1, 4 | CALM_COLORED_FRAMES);
        firsts[i] = stats_of(block).first_color;
        for (size_t k = 0; k < i; k++) {
            CHECK(firsts[k] != firsts[i]);
        }
        calm_colored_free(block);
    }
}

/* Blocks of a page, until there are no more, or most. Returns how many. */
static size_t take_all(char **blocks, size_t most) {
    size_t count = 0;
    void *block;
    while (count < most && colored_alloc(root, 1, 2 | CALM_COLORED_FRAMES, &block) == 0) {
        blocks[count++] = block;
    }
    return count;
}

static void test_as_many_as_there_may_be(void) {
    enum { MOST = 1024 };
    static char *blocks[MOST];
    size_t count = take_all(blocks, MOST);
    CHECK(count > MOST - 16); /* some are held by the tests before */
    CHECK_EQUAL(why_not(root, 1, 2 | CALM_COLORED_FRAMES), ENOMEM);
    calm_colored_free(NULL);
    calm_colored_free(blocks[count / 2]);
    blocks[count / 2] = take(1, 2 | CALM_COLORED_FRAMES);
    for (size_t i = 0; i < count; i++) {
        calm_colored_free(blocks[i]);
    }
}

/* What either call answers from now on. */
static void deny(unsigned first, unsigned second, unsigned error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, first, 1, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, second, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* Answers one advice as another kernel would. */
static void refuse_advice(unsigned advice, unsigned error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, advice, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof filter[0], filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

/* Which cannot be told to make pages resident: they are touched. */
static void test_older_kernel(void) {
    refuse_advice(MADV_POPULATE_WRITE, EINVAL);
    char *block = take(100 * page_bytes, 2 | CALM_COLORED_FRAMES);
    check_block(block, 100 * page_bytes);
    calm_colored_free(block);
}

static void test_pages_that_cannot_be_had(void) {
    size_t before = pages_reserved();
    refuse_advice(MADV_POPULATE_WRITE, ENOMEM);
    CHECK_EQUAL(why_not(root, 64 * page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    CHECK_EQUAL(pages_reserved(), before);
}

/* A kernel without huge pages needs not be told that none are wanted; any other is. */
static void test_huge_pages_are_not_wanted(void) {
    struct stat status;
    char line[512];
    bool within = false;
    bool said = false;
    char *block = take(page_bytes, 2 | CALM_COLORED_FRAMES);
    FILE *maps = fopen("/proc/self/smaps", "re");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        unsigned long from;
        unsigned long to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2) {
            within = from <= (uintptr_t)block && (uintptr_t)block < to;
        } else if (within && strncmp(line, "VmFlags:", 8) == 0) {
            said = strstr(line, " nh") != NULL;
        }
    }
    CHECK(fclose(maps) == 0);
    CHECK(said || stat("/sys/kernel/mm/transparent_hugepage", &status) != 0);
    calm_colored_free(block);
    refuse_advice(MADV_NOHUGEPAGE, EINVAL);
    calm_colored_free(take(page_bytes, 2 | CALM_COLORED_FRAMES));
}

static void test_without_userfaultfd(void) {
    enum { PAGES = 200 };
    deny(SYS_userfaultfd, SYS_userfaultfd, EPERM);
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    check_block(block, PAGES * page_bytes);
    CHECK(mappings_of(block, PAGES * page_bytes) > 1);
    calm_colored_free(block);
    CHECK_EQUAL(mappings_of(block, PAGES * page_bytes), 0);
    /* What fails before it has mappings gives none back that another had. */
    put_memory(poor_root, 16 * page_bytes);
    CHECK_EQUAL(why_not(poor_root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    calm_colored_free(take(page_bytes, 2 | CALM_COLORED_FRAMES));
}

/* All blocks together, not each, have so many mappings; what fails, and what is freed, gives its own back. */
static void test_mappings_end(void) {
    enum { BLOCKS = 4, PAGES = MAX_PAGE_MAPPINGS / BLOCKS };
    char *blocks[BLOCKS];
    deny(SYS_userfaultfd, SYS_userfaultfd, EPERM);
    for (size_t i = 0; i < BLOCKS - 1; i++) {
        blocks[i] = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    }
    CHECK_EQUAL(why_not(root, (PAGES + 1) * page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    blocks[BLOCKS - 1] = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    calm_colored_free(blocks[0]);
    blocks[0] = take(page_bytes, 2 | CALM_COLORED_FRAMES);
    for (size_t i = 0; i < BLOCKS; i++) {
        calm_colored_free(blocks[i]);
    }
}

static void test_where_pages_cannot_be_moved(void) {
    deny(SYS_userfaultfd, SYS_mremap, EPERM);
    size_t before = all_mappings();
    CHECK_EQUAL(why_not(root, 64 * page_bytes, 2 | CALM_COLORED_FRAMES), ENOTSUP);
    CHECK(all_mappings() <= before + 1);
}

static void test_where_mappings_cannot_be_had(void) {
    deny(SYS_userfaultfd, SYS_mremap, ENOMEM);
    CHECK_EQUAL(why_not(root, 64 * page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
}

/* Before Linux 6.8: there is one, that cannot move. */
static void test_older_userfaultfd(void) {
    enum { PAGES = 10 };
    int file = dup(0);
    CHECK(file >= 0 && close(file) == 0);
    deny(SYS_ioctl, SYS_ioctl, EINVAL);
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    check_block(block, PAGES * page_bytes);
    int file_now = dup(0);
    CHECK(file_now == file && close(file_now) == 0);
    calm_colored_free(block);
}

/* What is moved leaves its address ours; and what cannot be moved takes none of the mappings. */
static void test_moves_of_pages(void) {
    struct page_mover mover = {.descriptor = -1};
    char *pages = mmap(NULL, 2 * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *home = mmap(NULL, page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED && home != MAP_FAILED);
    memset(pages, 7, 2 * page_bytes);
    CHECK_EQUAL(page_mover_move(&mover, pages, home), 0);
    CHECK_EQUAL(mover.mappings, 1);
    CHECK(home[0] == 7 && home[page_bytes - 1] == 7);
    unsigned char resident[2];
    CHECK(mincore(pages, 2 * page_bytes, resident) == 0); /* ENOMEM, if a part is not mapped */
    CHECK((resident[0] & 1) == 0 && (resident[1] & 1) == 1);
    for (size_t i = 0; i < MAX_PAGE_MAPPINGS + 1; i++) {
        CHECK_EQUAL(page_mover_move(&mover, pages + 1, home), ENOTSUP); /* no page begins there */
    }
    CHECK_EQUAL(mover.mappings, 1);
    page_mappings_return(1);
    CHECK(munmap(pages, 2 * page_bytes) == 0 && munmap(home, page_bytes) == 0);
}

static void test_locked_memory(void) {
    enum { PAGES = 100 };
    if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0) {
        puts("left out: memory cannot be locked");
        return;
    }
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    check_block(block, PAGES * page_bytes);
    calm_colored_free(block);
    CHECK_EQUAL(mappings_of(block, PAGES * page_bytes), 0);
}

static void test_a_limit_on_address_space(void) {
    struct rlimit none = {0, 0};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0);
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
}

static char *inherited;

static void test_a_child_has_its_own(void) {
    enum { PAGES = 32 };
    CHECK(inherited[0] == 'p');
    memset(inherited, 'c', PAGES * page_bytes);
    calm_colored_free(inherited);
    char *block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    check_block(block, PAGES * page_bytes);
    calm_colored_free(block);
}

static void test_fork(void) {
    enum { PAGES = 32 };
    inherited = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES);
    memset(inherited, 'p', PAGES * page_bytes);
    in_child(test_a_child_has_its_own);
    for (size_t i = 0; i < PAGES * page_bytes; i++) {
        CHECK(inherited[i] == 'p');
    }
    calm_colored_free(inherited);
}

/* With a mapping for each page, of which the child has those that its parent had. */
static void test_fork_without_userfaultfd(void) {
    deny(SYS_userfaultfd, SYS_userfaultfd, EPERM);
    test_fork();
}

static size_t blocks_to_be_had(void) {
    enum { MOST = 2048 };
    static char *blocks[MOST];
    size_t count = take_all(blocks, MOST);
    for (size_t i = 0; i < count; i++) {
        calm_colored_free(blocks[i]);
    }
    return count;
}

enum { PAGES_IN_THE_MAKING = 2048 };
static size_t blocks_before;
static size_t reserved_before;

static void *make_and_free(void *unused) {
    (void)unused;
    char *block = take_from(poor_root, PAGES_IN_THE_MAKING * page_bytes, 2 | CALM_COLORED_FRAMES);
    memset(block, 1, PAGES_IN_THE_MAKING * page_bytes);
    CHECK_EQUAL(stats_of(block).pages, PAGES_IN_THE_MAKING);
    calm_colored_free(block);
    return NULL;
}

static void test_a_child_has_nothing_in_the_making(void) {
    CHECK(pages_reserved() + 4 * PAGES_IN_THE_MAKING <= reserved_before);
    CHECK(blocks_before == 0 || blocks_to_be_had() == blocks_before);
}

/* A thread that the child does not have waits for what the machine's memory is, the surplus reserved. The
 * parent, of which it is one, sees it through. */
static void fork_while_a_block_is_made(void) {
    pthread_t thread;
    char path[128];
    char path_later[128];
    snprintf(path, sizeof path, "%s/proc/meminfo", poor_root);
    snprintf(path_later, sizeof path_later, "%s/proc/meminfo-later", poor_root);
    put_memory(poor_root, (size_t)1 << 40);
    CHECK(rename(path, path_later) == 0 && mkfifo(path, 0600) == 0);
    CHECK(pthread_create(&thread, NULL, make_and_free, NULL) == 0);
    FILE *memory = fopen(path, "we"); /* when the thread has opened it */
    CHECK(memory != NULL);
    reserved_before = pages_reserved();
    in_child(test_a_child_has_nothing_in_the_making);
    CHECK(calm_set("misuse", "warn") == 0);
    calm_colored_free((void *)1); /* which is no name for it */
    CHECK(calm_set("misuse", "abort") == 0);
    CHECK(rename(path_later, path) == 0);
    CHECK(fputs("MemAvailable: 1000000 kB\n", memory) >= 0);
    CHECK(fclose(memory) == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* Where there were never more blocks than are now. */
static void test_fork_while_an_early_block_is_made(void) {
    take(page_bytes, 2 | CALM_COLORED_FRAMES);
    take(page_bytes, 2 | CALM_COLORED_FRAMES);
    fork_while_a_block_is_made();
}

static void test_fork_while_a_block_is_made(void) {
    blocks_before = blocks_to_be_had();
    fork_while_a_block_is_made();
    CHECK_EQUAL(blocks_to_be_had(), blocks_before);
}

static void *take_and_free(void *argument) {
    for (size_t i = 0; i < 30; i++) {
        size_t pages = 1 + (i * 7 + (size_t)(uintptr_t)argument) % 40;
        char *block = take(pages * page_bytes, 2 | CALM_COLORED_FRAMES);
        memset(block, (int)(uintptr_t)argument, pages * page_bytes);
        CHECK_EQUAL(stats_of(block).pages, pages);
        for (size_t at = 0; at < pages * page_bytes; at += page_bytes) {
            CHECK(block[at] == (char)(uintptr_t)argument);
        }
        calm_colored_free(block);
    }
    return NULL;
}

static void test_threads(void) {
    pthread_t threads[4];
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK(pthread_create(&threads[i], NULL, take_and_free, (void *)(i + 1)) == 0);
    }
    for (size_t i = 0; i < 4; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/* Runs free of what is no block in a child, with misuse=warn, and returns what it says. */
static void test_misuse_is_named(void) {
    int ends[2];
    char text[8192] = "";
    char *twice = frames_are_shown ? take(1, 2 | CALM_COLORED_FRAMES) : NULL;
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(calm_set("misuse", "warn") == 0);
        CHECK(dup2(ends[1], 2) == 2);
        if (twice != NULL) {
            calm_colored_free(twice);
            calm_colored_free(twice);
        } else {
            calm_colored_free(ends);
        }
        calm_colored_free((void *)1);
        _exit(0);
    }
    close(ends[1]);
    size_t length = 0;
    for (ssize_t part; (part = read(ends[0], text + length, sizeof text - 1 - length)) > 0;) {
        length += (size_t)part;
    }
    close(ends[0]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    const char *first = strstr(text, "calmalloc: invalid free: ");
    CHECK(first != NULL && strstr(first + 1, "calmalloc: invalid free: ") != NULL);
    calm_colored_free(twice);
}

/* Pages of one color as simulated lie as many places apart as there are colors, but for those that are said
 * to be elsewhere. */
static void check_timed(const char *block, size_t pages) {
    struct calm_colored stats = stats_of(block);
    uint64_t frames[512];
    size_t misplaced = 0;
    CHECK(pages <= sizeof frames / sizeof frames[0]);
    CHECK_EQUAL(stats.source, CALM_COLORED_TIMED);
    CHECK_EQUAL(stats.pages, pages);
    CHECK_EQUAL(stats.colors, COLORS);
    CHECK_EQUAL(pagemap_frames("", block, pages, frames), 0);
    for (size_t place = 0; place < COLORS; place++) {
        size_t of[COLORS] = {0};
        size_t most = 0;
        size_t all = 0;
        for (size_t i = place; i < pages; i += COLORS) {
            size_t here = ++of[simulated(frames[i])];
            most = here > most ? here : most;
            all++;
        }
        misplaced += all - most;
    }
    CHECK_EQUAL(stats.pages_misplaced, misplaced);
    CHECK_EQUAL(misplaced, 0);
}

/* The cache can confirm frames only if there are enough pages of each color among those that the kernel
 * gives, which on a machine that has run for some time is a matter of chance. */
static char *take_believed(size_t bytes) {
    for (int tries = 0; tries < 100; tries++) {
        char *block = take(bytes, 2);
        if (stats_of(block).source == CALM_COLORED_FRAMES) {
            return block;
        }
        calm_colored_free(block);
    }
    CHECK(!"frames are believed");
    return NULL;
}

/* By default frames are believed if the cache agrees, and else it is asked. */
static void test_whom_to_believe(void) {
    enum { PAGES = 128 };
    simulated = by_frame;
    char *block = take_believed(PAGES * page_bytes);
    for (size_t i = 0; i < PAGES; i++) {
        CHECK_EQUAL(color_now(block + i * page_bytes), (stats_of(block).first_color + i) % COLORS);
    }
    calm_colored_free(block);
    block = take(PAGES * page_bytes, 2 | CALM_COLORED_TIMED);
    check_timed(block, PAGES);
    calm_colored_free(block);

    simulated = by_another_number;
    block = take(PAGES * page_bytes, 2);
    check_timed(block, PAGES);
    calm_colored_free(block);
    times_opened = 0;
    block = take(PAGES * page_bytes, 2 | CALM_COLORED_FRAMES); /* who asks for frames gets them */
    CHECK_EQUAL(stats_of(block).source, CALM_COLORED_FRAMES);
    calm_colored_free(block);
    block = take(page_bytes, 4); /* of too many colors */
    CHECK_EQUAL(stats_of(block).source, CALM_COLORED_FRAMES);
    calm_colored_free(block);
    CHECK_EQUAL(times_opened, 0);

    /* Where frames say nothing. */
    put_empty_pagemap_anew(poor_root);
    put_memory(poor_root, (size_t)1 << 40);
    block = take_from(poor_root, PAGES * page_bytes, 2);
    check_timed(block, PAGES);
    calm_colored_free(block);

    simulated = by_none;
    CHECK_EQUAL(why_not(root, page_bytes, 2), EAGAIN);
    times_opened = 0;
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_TIMED), EAGAIN);
    CHECK(times_opened > 1); /* what is wrong once may be right the next time */
    simulated = NULL;
}

/* Of a cache that answers nothing, a larger block may be asked for longer: each reading of the clock is a
 * second later. */
static void test_time_grows_with_the_block(void) {
    const size_t sizes[] = {(size_t)1 << 20, (size_t)32 << 20};
    uint64_t looked[2];
    simulated = by_none;
    for (size_t i = 0; i < 2; i++) {
        uint64_t before = clock_readings();
        clock_set_step(1000 * CLOCK_MS);
        CHECK_EQUAL(why_not(root, sizes[i], 2 | CALM_COLORED_TIMED), EAGAIN);
        clock_set_step(0);
        looked[i] = clock_readings() - before;
    }
    CHECK(looked[0] > 10 && looked[0] <= 12);
    CHECK_EQUAL(looked[1], looked[0] + 10);
    simulated = NULL;
}

static void test_a_group_that_is_short(void) {
    group_is_short = true;
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    CHECK_EQUAL(why_not(root, page_bytes, 2), ENOMEM);
    group_is_short = false;
}

/* Above what any load takes, and below. */
static void test_votes(void) {
    static char page[4096];
    struct eviction eviction = {.base = page, .page_bytes = sizeof page, .line_bytes = 64};
    eviction.miss_cycles = UINT64_MAX;
    CHECK(!eviction_evicts(&eviction, 0, NULL, 0));
    eviction.miss_cycles = 0;
    CHECK(eviction_evicts(&eviction, 0, NULL, 0));
}

/* A load after no others finds its line, and one after four times what the cache holds does not, where the
 * cache can be seen at all. What else runs on the machine may spoil how a hit was told from a miss, for once:
 * whoever asks does it anew then, and so does this. */
static void test_evictions(void) {
    enum { ASKED = 20, ROUNDS = 50 };
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    size_t at = 0;
    while (at < count && caches[at].level != 2) {
        at++;
    }
    size_t colors = at < count ? hardware_cache_way_bytes(&caches[at]) / page_bytes : 0;
    if (!eviction_can_time() || colors == 0 || colors > 64) {
        puts("left out: evictions cannot be timed");
        return;
    }
    size_t pages = 4 * colors * caches[at].ways + 1;
    char *base = mmap(NULL, pages * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint32_t *walked = calloc(pages, sizeof *walked);
    CHECK(base != MAP_FAILED && walked != NULL);
    memset(base, 1, pages * page_bytes);
    for (size_t i = 0; i + 1 < pages; i++) {
        walked[i] = (uint32_t)i + 1;
    }
    size_t seen = 0; /* rounds */
    size_t few = 0;  /* evictions after no loads, in all rounds, */
    size_t many = 0; /* and after all of them */
    bool told = false;
    for (size_t round = 0; round < ROUNDS && !told; round++) {
        struct eviction eviction;
        if (!eviction_open(&eviction, base, pages, page_bytes, &caches[at], colors)) {
            continue;
        }
        size_t few_before = few;
        size_t many_before = many;
        for (size_t i = 0; i < ASKED; i++) {
            few += eviction_evicts(&eviction, 0, walked, 0);
            many += eviction_evicts(&eviction, 0, walked, pages - 1);
        }
        seen++;
        told = few - few_before < ASKED / 2 && many - many_before > ASKED / 2;
    }
    CHECK(told || seen <= ROUNDS / 2 || many > few);
    if (!told) {
        puts("left out: the cache is not seen");
    }
    free(walked);
    CHECK(munmap(base, pages * page_bytes) == 0);
}

/* On the machine's own cache. Whether colors can be told there is the machine's affair. */
static void test_by_time(void) {
    enum { BYTES = 1 << 20 };
    char *block = calm_colored_alloc(BYTES, 2 | CALM_COLORED_TIMED);
    if (block == NULL) {
        CHECK(errno == EAGAIN || errno == ENOTSUP || errno == ENOMEM);
        printf("left out: by time: %s\n", strerror(errno));
        return;
    }
    struct calm_colored stats = stats_of(block);
    CHECK_EQUAL(stats.source, CALM_COLORED_TIMED);
    CHECK_EQUAL(stats.pages, BYTES / page_bytes);
    CHECK(stats.colors > 1 && stats.first_color < stats.colors);
    CHECK(stats.pages_misplaced <= stats.pages / 2);
    for (size_t i = 0; i < BYTES; i++) {
        CHECK(block[i] == 0);
    }
    memset(block, 1, BYTES);
    calm_colored_free(block);
    CHECK_EQUAL(mappings_of(block, BYTES), 0);
}

/* The search asks for the time before each question. */
static void test_time_is_bounded(void) {
    uint64_t before = clock_readings();
    clock_set_step(1000 * CLOCK_MS);
    errno = 0;
    char *block = calm_colored_alloc(1 << 20, 2 | CALM_COLORED_TIMED);
    int error = errno;
    clock_set_step(0);
    CHECK(block == NULL);
    CHECK(error == EAGAIN || error == ENOTSUP || error == ENOMEM);
    CHECK(clock_readings() - before <= 12);
}

int main(void) {
    page_bytes = vm_page_size();
    make_machine(root);
    make_machine(poor_root);
    char link[64];
    snprintf(link, sizeof link, "%s/proc", root);
    CHECK(symlink("/proc", link) == 0);

    test_pagemap();
    test_entries();
    test_a_root_that_is_too_long();
    test_errors();
    in_child(test_frames_that_are_hidden);
    test_misuse_is_named();
    in_child(test_memory_that_ends_midway);
    in_child(test_what_is_not_found);
    in_child(test_frames_that_are_hidden_cost_nothing);
    test_moves_of_pages();
    test_votes();
    test_evictions();
    test_by_time();
    clock_stop(); /* from here on what is found out by time has the time that it needs */
    test_time_is_bounded();
    if (frames_are_shown) {
        in_child(test_fork_while_an_early_block_is_made);
        test_blocks();
        test_what_is_left();
        test_few_are_examined();
        test_a_group_that_is_short();
        in_child(test_whom_to_believe);
        in_child(test_time_grows_with_the_block);
        test_what_is_moved_later();
        test_blocks_begin_apart();
        test_as_many_as_there_may_be();
        test_frames_by_default();
        in_child(test_older_kernel);
        in_child(test_pages_that_cannot_be_had);
        in_child(test_huge_pages_are_not_wanted);
        in_child(test_without_userfaultfd);
        in_child(test_mappings_end);
        in_child(test_where_pages_cannot_be_moved);
        in_child(test_where_mappings_cannot_be_had);
        in_child(test_older_userfaultfd);
        in_child(test_locked_memory);
        in_child(test_a_limit_on_address_space);
        test_fork();
        in_child(test_fork_without_userfaultfd);
        test_fork_while_a_block_is_made();
        test_threads();
    } else {
        puts("left out: the kernel hides frames from this process");
    }
    remove_machine(root);
    remove_machine(poor_root);
    return 0;
}
