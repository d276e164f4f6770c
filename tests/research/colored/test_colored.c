/*
 * Colored memory, on the machine's own pages and a cache described by files.
 *
 * Checks that need frame numbers are skipped, with a message, if the kernel hides them.
 */
#include "colored/eviction.h"
#include "colored/page_mover.h"
#include "os/cgroup.h"
#include "os/mman.h"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>

#include "blocks.h"

/* ---- a control group that is short of memory ---- */

uint64_t __real_cgroup_available_bytes(const char *where, uint64_t *limit);
uint64_t __wrap_cgroup_available_bytes(const char *where, uint64_t *limit);

static bool group_is_short;

uint64_t __wrap_cgroup_available_bytes(const char *where, uint64_t *limit) {
    return group_is_short ? 0 : __real_cgroup_available_bytes(where, limit);
}

/* ---- what is seen from outside ---- */

static size_t all_mappings(void) {
    return mappings_of((void *)page_bytes, SIZE_MAX / 2);
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

static void give_up_root(void) {
    if (geteuid() == 0) {
        CHECK(setuid(65534) == 0);
    }
}

static void test_frames_that_are_hidden(void) {
    int error = has_pagemap() ? EPERM : ENOTSUP;
    give_up_root();
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), error);
    CHECK_EQUAL(why_not(root, page_bytes, 4), error); /* which only frames would do for */
    /* A file that can be opened, and shows nothing. */
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), error);
    CHECK_EQUAL(why_not(root, page_bytes, 4), error);
    errno = 0;
    struct calm_colored stats;
    CHECK(calm_colored_stats(root, &stats, sizeof stats) == -1 && errno == EINVAL);
}

/* That is known by one page, before there is memory for more. */
static void test_frames_that_are_hidden_cost_nothing(void) {
    char path[128];
    int error = has_pagemap() ? EPERM : ENOTSUP;
    snprintf(path, sizeof path, "%s/proc/self/pagemap", poor_root);
    CHECK(unlink(path) == 0);
    CHECK(symlink("/proc/self/pagemap", path) == 0);
    put_memory(poor_root, 16 * page_bytes);
    give_up_root();
    CHECK(prctl(PR_SET_DUMPABLE, 1) == 0);
    CHECK_EQUAL(why_not(poor_root, 100 * page_bytes, 2 | CALM_COLORED_FRAMES), error);
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

/* Known only once the pages are chosen. */
static void test_that_nothing_moves(void) {
    put_memory(poor_root, (size_t)1 << 40);
    CHECK_EQUAL(why_not(poor_root, 64 * page_bytes, 2 | CALM_COLORED_FRAMES), ENOTSUP);
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
    for (uintptr_t i = 0; i < 4; i++) {
        CHECK(!colored_free((void *)i)); /* which is no name for it */
    }
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

static char *freed;

static void free_again(void) {
    calm_colored_free(freed);
}

static void free_no_block(void) {
    calm_colored_free((void *)1);
}

/* In a child: one line that names the address, and the end. */
static void check_abort(void (*misuse)(void), const void *address) {
    int ends[2];
    char text[256] = "";
    char line[256];
    CHECK(pipe(ends) == 0);
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(setrlimit(RLIMIT_CORE, &(struct rlimit){0, 0}) == 0);
        CHECK(dup2(ends[1], 2) == 2);
        misuse();
        _exit(0);
    }
    CHECK(close(ends[1]) == 0);
    size_t length = 0;
    for (ssize_t part; (part = read(ends[0], text + length, sizeof text - 1 - length)) > 0;) {
        length += (size_t)part;
    }
    CHECK(close(ends[0]) == 0);
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    snprintf(line, sizeof line, "calmcolored: invalid free: %p is no colored block\n", address);
    CHECK(strcmp(text, line) == 0);
}

static void test_misuse_is_named(void) {
    check_abort(free_no_block, (void *)1);
    if (frames_are_shown()) {
        freed = take(1, 2 | CALM_COLORED_FRAMES);
        calm_colored_free(freed);
        check_abort(free_again, freed);
    }
}

static void test_a_group_that_is_short(void) {
    group_is_short = true;
    CHECK_EQUAL(why_not(root, page_bytes, 2 | CALM_COLORED_FRAMES), ENOMEM);
    CHECK_EQUAL(why_not(root, page_bytes, 2), ENOMEM);
    group_is_short = false;
}

int main(void) {
    make_machines();
    test_errors();
    in_child(test_frames_that_are_hidden);
    test_misuse_is_named();
    if (pages_can_move()) {
        in_child(test_memory_that_ends_midway);
        in_child(test_what_is_not_found);
    } else {
        in_child(test_that_nothing_moves);
    }
    in_child(test_frames_that_are_hidden_cost_nothing);
    if (frames_are_shown()) {
        in_child(test_fork_while_an_early_block_is_made);
        test_blocks();
        test_what_is_left();
        test_few_are_examined();
        test_a_group_that_is_short();
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
    }
    remove_machines();
    return 0;
}
