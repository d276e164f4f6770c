/* Address space: reserved, made usable, moved and renewed. */
#include "os/vm.h"

#include "os/address_range.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/syscall.h"

#include <errno.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "check.h"
#include "pages.h"

#ifndef PR_SET_VMA
#define PR_SET_VMA           0x53564d41
#define PR_SET_VMA_ANON_NAME 0
#endif

#define MIB ((size_t)1 << 20)

/* Whether the kernel may read there, asked without a fault. */
static bool is_readable(const void *address) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    long written = os_syscall(SYS_write, ends[1], (long)address, 1, 0, 0, 0);
    close(ends[0]);
    close(ends[1]);
    CHECK(written == 1 || written == -EFAULT);
    return written == 1;
}

static void test_reserve(void) {
    errno = KEPT_ERRNO;
    CHECK_EQUAL(vm_page_size(), page_size);
    char *base = vm_reserve(8 * MIB);
    CHECK(base != NULL);
    CHECK_EQUAL((uintptr_t)base % page_size, 0);
    CHECK(!is_readable(base) && !is_readable(base + 8 * MIB - 1));
    CHECK(vm_commit(base + MIB, page_size));
    CHECK(!is_readable(base + MIB - 1) && is_readable(base + MIB) && !is_readable(base + MIB + page_size));
    base[MIB] = 1;
    vm_release(base, 8 * MIB);
    CHECK(!is_readable(base + MIB));
    CHECK(vm_reserve((size_t)1 << 60) == NULL);
    CHECK(vm_reserve(SIZE_MAX - page_size + 1) == NULL);
    CHECK(!vm_commit(NULL, page_size));
    /* Sizes are rounded up to pages, between two that are not accessible. */
    base = vm_map(page_size + 1);
    CHECK(base != NULL && is_readable(base) && is_readable(base + page_size));
    CHECK(!is_readable(base - 1) && !is_readable(base + 2 * page_size));
    base[2 * page_size - 1] = 1;
    vm_release(base, page_size + 1);
    CHECK(!is_readable(base) && !is_readable(base + page_size));
    CHECK(vm_map((size_t)1 << 60) == NULL);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void test_region(void) {
    struct address_range region;
    CHECK(address_range_reserve(&region, 64 * MIB - 1) && region.reserved == 64 * MIB);
    errno = KEPT_ERRNO;
    size_t committed = 0;
    for (size_t bytes = 1; bytes < 64 * MIB; bytes += bytes / 3 + 1000) {
        CHECK(address_range_reach(&region, bytes));
        CHECK(region.committed >= bytes && region.committed <= region.reserved);
        CHECK(region.committed >= committed && region.committed % page_size == 0);
        committed = region.committed;
        region.base[bytes - 1] = 1;
        CHECK(is_readable(region.base + committed - 1));
        CHECK(committed == region.reserved || !is_readable(region.base + committed));
        CHECK(count_mappings(region.base, region.reserved) <= 3); /* one page is between them */
    }
    CHECK(!address_range_reach(&region, 64 * MIB + 1));
    CHECK_EQUAL(region.committed, committed);
    CHECK(address_range_reach(&region, 64 * MIB));
    CHECK_EQUAL(region.committed, 64 * MIB);
    char *base = region.base;
    address_range_release(&region);
    CHECK(region.base == NULL && region.reserved == 0 && !is_readable(base));
    address_range_release(&region);
    CHECK(!address_range_reserve(&region, (size_t)1 << 60) && region.base == NULL && region.reserved == 0);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static size_t data_bytes(void) {
    static char text[4096];
    CHECK(file_read("/proc/self/status", text, sizeof text) > 0);
    const char *line = strstr(text, "VmData:");
    CHECK(line != NULL);
    return (size_t)strtoull(line + 7, NULL, 10) << 10;
}

/* Where memory is short, what is needed may still be had, though not a large step; and what may not is
 * refused. */
static void test_region_short_of_memory(void) {
    struct address_range region;
    CHECK(address_range_reserve(&region, 64 * MIB));
    CHECK(address_range_reach(&region, 8 * MIB));
    size_t committed = region.committed;
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_DATA, &limit) == 0);
    limit.rlim_cur = data_bytes() + 16 * page_size;
    CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    CHECK(address_range_reach(&region, committed + 1));
    CHECK_EQUAL(region.committed, committed + page_size);
    region.base[committed] = 1;
    CHECK(!address_range_reach(&region, committed + 256 * page_size));
    CHECK_EQUAL(region.committed, committed + page_size);
}

static void test_address_space_limit(void) {
    struct rlimit limit;
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    CHECK_EQUAL(vm_limit_bytes(), limit.rlim_cur == RLIM_INFINITY ? SIZE_MAX : limit.rlim_cur);
    limit.rlim_cur = (rlim_t)1 << 50;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
    CHECK_EQUAL(vm_limit_bytes(), (size_t)1 << 50);
}

#define MOVED_PAGES 40

static void check_pages(const unsigned char *pages, size_t count, int first) {
    for (size_t i = 0; i < count; i++) {
        CHECK(page_holds(pages + i * page_size, (unsigned char)(first == 0 ? 0 : first + (int)i)));
    }
}

static void fill_pages(unsigned char *pages, size_t count, int first) {
    for (size_t i = 0; i < count; i++) {
        memset(pages + i * page_size, first + (int)i, page_size);
    }
}

static void check_moves(unsigned char *base, unsigned char *from, unsigned char *to) {
    size_t bytes = MOVED_PAGES * page_size;
    CHECK(vm_move_pages(from, to, bytes));
    check_pages(to, MOVED_PAGES, MOVED_PAGES + 1);
    check_pages(from, MOVED_PAGES, 0);
    check_pages(base, MOVED_PAGES, 1);
    check_pages(base + 2 * bytes, MOVED_PAGES, 2 * MOVED_PAGES + 1);
    check_pages(base + 4 * bytes, MOVED_PAGES, 101);
    check_pages(base + 6 * bytes, MOVED_PAGES, 101 + 2 * MOVED_PAGES);
    fill_pages(from, MOVED_PAGES, 7);
    check_pages(to, MOVED_PAGES, MOVED_PAGES + 1);

    /* Back, and once more: from where pages came from, to where others lie. */
    CHECK(vm_move_pages(to, from, bytes));
    check_pages(from, MOVED_PAGES, MOVED_PAGES + 1);
    CHECK(vm_move_pages(from, to, bytes));
}

static void check_refusal(unsigned char *from, unsigned char *to) {
    CHECK(!vm_move_pages(from, to, MOVED_PAGES * page_size));
    check_pages(from, MOVED_PAGES, MOVED_PAGES + 1);
    check_pages(to, MOVED_PAGES, 101 + MOVED_PAGES);
}

/* Both ranges within one mapping, as in a heap. */
static void test_move_and_renew(void) {
    bool can_move = pages_can_move();
    size_t bytes = MOVED_PAGES * page_size;
    unsigned char *base = vm_reserve(10 * bytes);
    CHECK(base != NULL && vm_commit(base, 10 * bytes));
    unsigned char *from = base + bytes;
    unsigned char *to = base + 5 * bytes;
    fill_pages(base, 3 * MOVED_PAGES, 1);
    fill_pages(base + 4 * bytes, 3 * MOVED_PAGES, 101);
    errno = KEPT_ERRNO;
    if (can_move) {
        check_moves(base, from, to);
    } else {
        check_refusal(from, to);
    }
    CHECK(vm_replace(to, bytes));
    check_pages(to, MOVED_PAGES, 0);
    fill_pages(to, MOVED_PAGES, 9);
    CHECK(vm_replace(from, bytes));
    check_pages(from, MOVED_PAGES, 0);
    CHECK(vm_replace(to, bytes));
    CHECK(count_mappings(base, 10 * bytes) <= 3);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    vm_release(base, 10 * bytes);
}

/* From pages that are of several mappings (some of them locked, say): moved, or nothing changed at all. */
static void test_move_across_mappings(void) {
    size_t bytes = MOVED_PAGES * page_size;
    unsigned char *base = vm_reserve(4 * bytes);
    CHECK(base != NULL && vm_commit(base, 4 * bytes));
    unsigned char *to = base + 2 * bytes;
    fill_pages(base, MOVED_PAGES, 1);
    fill_pages(to, MOVED_PAGES, 101);
    CHECK(madvise(base + 9 * page_size, page_size, MADV_DONTFORK) == 0);
    CHECK(count_mappings(base, bytes) > 1);
    bool moved = vm_move_pages(base, to, bytes);
    printf("pages of several mappings are moved: %s\n", moved ? "yes" : "no");
    CHECK(is_readable(to) && is_readable(to + bytes - 1));
    check_pages(to, MOVED_PAGES, moved ? 1 : 101);
    check_pages(base, MOVED_PAGES, moved ? 0 : 1);
    vm_release(base, 4 * bytes);
}

/* All of a range has the library's name, also what is replaced, where the kernel names ranges. */
static void test_name(void) {
    size_t bytes = 8 * page_size;
    unsigned char *base = vm_reserve(bytes);
    CHECK(base != NULL && vm_commit(base, bytes) && vm_replace(base + page_size, page_size));
    bool names = prctl(PR_SET_VMA, PR_SET_VMA_ANON_NAME, base, page_size, "calmalloc") == 0;
    printf("ranges are named: %s\n", names ? "yes" : "no");
    size_t named = count_mappings_with(base, bytes, "[anon:calmalloc]");
    CHECK_EQUAL(named, names ? count_mappings(base, bytes) : 0);
    CHECK(vm_can_merge_replaced());
    filters_set(FILTERS_ADDED); /* from then on nothing is named */
    CHECK_EQUAL(vm_can_merge_replaced(), !names);
    vm_release(base, bytes);
}

int main(void) {
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    test_reserve();
    in_child(test_name);
    test_region();
    if (data_limit_counts_mappings()) {
        in_child(test_region_short_of_memory);
    } else {
        puts("left out: RLIMIT_DATA does not count mappings");
    }
    in_child(test_address_space_limit);
    test_move_and_renew();
    test_move_across_mappings();
    return 0;
}
