/* Purging of ranges: what the kernel does, refuses, or only says that it does. */
#include "os/purge.h"

#include "os/filters.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/syscall.h>

#include "check.h"
#include "deny_vectored.h"
#include "pages.h"

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

#define RANGES      40
#define RANGE_PAGES 3 /* with one page between two ranges */

struct field {
    unsigned char *pages;
    struct iovec ranges[RANGES];
};

/* Every page is touched; the last page of four belongs to no range. */
static struct field make_field(void) {
    struct field field = {.pages = map_pages((size_t)RANGES * (RANGE_PAGES + 1))};
    memset(field.pages, 0xA5, (size_t)RANGES * (RANGE_PAGES + 1) * page_size);
    for (size_t i = 0; i < RANGES; i++) {
        field.ranges[i].iov_base = field.pages + i * (RANGE_PAGES + 1) * page_size;
        field.ranges[i].iov_len = RANGE_PAGES * page_size;
    }
    return field;
}

static bool is_told;

/* Exactly the ranges [from, to) are purged. */
static void check_purged(const struct field *field, size_t from, size_t to) {
    for (size_t i = 0; i < (size_t)RANGES * (RANGE_PAGES + 1); i++) {
        size_t range = i / (RANGE_PAGES + 1);
        bool purged = i % (RANGE_PAGES + 1) < RANGE_PAGES && range >= from && range < to;
        const unsigned char *page = field->pages + i * page_size;
        /* First: the next line may make it resident. */
        CHECK(!is_told || (resident_pages(page, page_size) == 0) == purged);
        CHECK(page_holds(page, purged ? 0 : 0xA5));
    }
}

static struct purge_result purge_field(const struct field *field) {
    errno = KEPT_ERRNO;
    struct purge_result result = purge_ranges(field->ranges, RANGES);
    CHECK(errno == KEPT_ERRNO);
    return result;
}

static bool has_vectored;

static void check_all_purged_by_one_call(void) {
    struct field field = make_field();
    struct purge_result result = purge_field(&field);
    CHECK_EQUAL(result.ranges_done, RANGES);
    CHECK_EQUAL(result.error, 0);
    CHECK_EQUAL(result.vectored_calls, 1);
    CHECK_EQUAL(result.single_calls, 0);
    CHECK_EQUAL(purge_current_method(), PURGE_VECTORED);
    check_purged(&field, 0, RANGES);
}

static void check_all_purged_one_by_one(void) {
    struct field field = make_field();
    struct purge_result result = purge_field(&field);
    CHECK_EQUAL(result.ranges_done, RANGES);
    CHECK_EQUAL(result.error, 0);
    CHECK_EQUAL(result.vectored_calls, 0);
    CHECK_EQUAL(result.single_calls, RANGES);
    CHECK_EQUAL(purge_current_method(), PURGE_SINGLE);
    check_purged(&field, 0, RANGES);
}

static void check_all_purged(void) {
    if (has_vectored) {
        check_all_purged_by_one_call();
    } else {
        check_all_purged_one_by_one();
    }
}

static void test_purge(void) {
    CHECK_EQUAL(purge_current_method(), PURGE_UNKNOWN);
    struct purge_result nothing = purge_ranges(NULL, 0);
    CHECK(nothing.ranges_done == 0 && nothing.error == 0 && nothing.vectored_calls == 0);
    CHECK_EQUAL(purge_current_method(), PURGE_UNKNOWN);
    check_all_purged();
    check_all_purged();
}

/* Calls answer that they purged, and do nothing, as in emulators; from the start, or from a filter on that
 * the program adds. */
static void answer_without_purging(bool vectored, bool single) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, vectored ? SYS_process_madvise : UINT32_MAX, 2, 0),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, single ? SYS_madvise : UINT32_MAX, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | 0),
    };
    add_filter(filter, sizeof filter / sizeof filter[0]);
}

static void check_nothing_purged(void) {
    struct field field = make_field();
    struct purge_result result = purge_field(&field);
    CHECK_EQUAL(result.ranges_done, 0);
    CHECK(result.error != 0);
    check_purged(&field, 0, 0);
}

static void test_purge_without_effect(void) {
    answer_without_purging(true, true);
    check_nothing_purged();
    check_nothing_purged();
    CHECK_EQUAL(purge_current_method(), PURGE_IMPOSSIBLE);
}

static void test_vectored_purge_without_effect(void) {
    answer_without_purging(true, false);
    check_all_purged_one_by_one();
}

static void test_purge_without_effect_later(void) {
    check_all_purged();
    answer_without_purging(true, true);
    filters_set(FILTERS_ADDED);
    check_nothing_purged();
}

static void test_purge_denied_eperm(void) {
    deny_vectored(EPERM, false);
    check_all_purged_one_by_one();
    check_all_purged_one_by_one();
}

static void test_purge_denied_enosys(void) {
    deny_vectored(ENOSYS, false);
    check_all_purged_one_by_one();
    check_all_purged_one_by_one();
}

/* Denied only after it has worked: still everything is purged. */
static void test_purge_denied_later(void) {
    check_all_purged();
    deny_vectored(EPERM, false);
    struct field field = make_field();
    struct purge_result result = purge_field(&field);
    CHECK_EQUAL(result.ranges_done, RANGES);
    CHECK_EQUAL(result.single_calls, RANGES);
    check_purged(&field, 0, RANGES);
}

static int lowest_free_descriptor(void) {
    int descriptor = open("/dev/null", O_RDONLY | O_CLOEXEC);
    CHECK(descriptor >= 0);
    close(descriptor);
    return descriptor;
}

/* Linux 6.13, which knows no PIDFD_SELF. */
static void test_purge_by_descriptor(void) {
    deny_vectored(EBADF, true);
    int before = lowest_free_descriptor();
    check_all_purged();
    check_all_purged();
    CHECK_EQUAL(lowest_free_descriptor(), before);
}

/* Twice: a child must not act on its parent by anything that the parent's own purge has left behind. */
static void purge_in_child_of_purger(void) {
    check_all_purged();
    struct field field = make_field();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct purge_result result = purge_field(&field);
        CHECK_EQUAL(result.ranges_done, RANGES);
        check_purged(&field, 0, RANGES);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    check_purged(&field, 0, 0);
}

static void test_purge_in_child_by_descriptor(void) {
    deny_vectored(EBADF, true);
    purge_in_child_of_purger();
}

/* The raw call: sanitizers make mlock do nothing. */
static bool lock_page(void *page) {
    return syscall(SYS_mlock, page, page_size) == 0;
}

#define LOCKED 7

/* A range with a locked page stops the purge; what lies before it is done, what lies behind is not begun. */
static void purge_up_to_locked(size_t page_of_range) {
    struct field field = make_field();
    struct field before = field;
    CHECK(lock_page((char *)field.ranges[LOCKED].iov_base + page_of_range * page_size));
    struct purge_result result = purge_field(&field);
    CHECK_EQUAL(result.ranges_done, LOCKED);
    CHECK_EQUAL(result.error, EINVAL);
    CHECK_EQUAL(result.vectored_calls, has_vectored ? 1 : 0);
    CHECK_EQUAL(result.single_calls, has_vectored ? 0 : LOCKED);
    if (page_of_range == 0) {
        check_purged(&field, 0, LOCKED);
    }
    CHECK(memcmp(before.ranges, field.ranges, sizeof field.ranges) == 0);

    /* Of the locked range alone nothing can be done, and what is behind it can. */
    result = purge_ranges(&field.ranges[LOCKED], 1);
    CHECK(result.ranges_done == 0 && result.error == EINVAL);
    CHECK(result.vectored_calls == 0 && result.single_calls == 0);
    result = purge_ranges(&field.ranges[LOCKED + 1], RANGES - LOCKED - 1);
    CHECK_EQUAL(result.ranges_done, RANGES - LOCKED - 1);
    CHECK_EQUAL(result.single_calls, has_vectored ? 0 : RANGES - LOCKED - 1);
}

static void test_purge_locked(void) {
    purge_up_to_locked(0);
    purge_up_to_locked(RANGE_PAGES - 1);
}

static void test_purge_locked_denied(void) {
    deny_vectored(EPERM, false);
    has_vectored = false;
    purge_up_to_locked(0);
    purge_up_to_locked(RANGE_PAGES - 1);
}

/* A refusal of the very first range says nothing about the system call. */
static void test_purge_locked_first(void) {
    struct field field = make_field();
    CHECK(lock_page(field.ranges[0].iov_base));
    struct purge_result result = purge_field(&field);
    CHECK(result.ranges_done == 0 && result.error == EINVAL);
    CHECK_EQUAL(purge_current_method(), has_vectored ? PURGE_VECTORED : PURGE_SINGLE);
    check_purged(&field, 0, 0);
    check_all_purged();
}

/* The kernel's own word, by the calls that the library would make. */
static bool kernel_has_vectored(void) {
    unsigned char *page = map_pages(1);
    struct iovec range = {page, page_size};
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    bool has = self >= 0 && syscall(SYS_process_madvise, self, &range, 1, MADV_DONTNEED, 0) > 0;
    close(self);
    return has;
}

int main(void) {
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    filters_detect();
    is_told = residency_is_told();
    has_vectored = kernel_has_vectored();
    printf("process_madvise on oneself: %s\n", has_vectored ? "yes" : "no");

    in_child(test_purge);
    in_child(test_purge_without_effect);
    in_child(test_vectored_purge_without_effect);
    in_child(test_purge_without_effect_later);
    in_child(test_purge_denied_eperm);
    in_child(test_purge_denied_enosys);
    in_child(test_purge_denied_later);
    in_child(test_purge_by_descriptor);
    in_child(purge_in_child_of_purger);
    in_child(test_purge_in_child_by_descriptor);
    in_child(test_purge_locked);
    in_child(test_purge_locked_denied);
    in_child(test_purge_locked_first);
    return 0;
}
