/* The system calls of src/os/: what they report, and what they do to memory. */
#include "os/cpu_usage.h"
#include "os/purge.h"
#include "os/residency.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

#include "check.h"

#define KEPT_ERRNO 1234 /* none of the system's */
#define SECOND_NS  1000000000ULL

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

static size_t page_bytes;

static uint64_t now_ns(void) {
    struct timespec now;
    CHECK(clock_gettime(CLOCK_MONOTONIC, &now) == 0);
    return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/* Counts by glibc's way, to be compared with ours. */
static unsigned affinity_by_glibc(void) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    return (unsigned)CPU_COUNT(&set);
}

static void test_affinity(void) {
    errno = KEPT_ERRNO;
    CHECK_EQUAL(cpu_affinity_count(), affinity_by_glibc());
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    int cpu = 0;
    while (!CPU_ISSET(cpu, &set)) {
        cpu++;
    }
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    CHECK(sched_setaffinity(0, sizeof set, &set) == 0);
    CHECK_EQUAL(cpu_affinity_count(), 1);
    struct cpu_usage usage = {0};
    CHECK(cpu_usage_sample(&usage) == 1.0);
    CHECK(cpu_usage_sample(&usage) == 1.0);
    CHECK(errno == KEPT_ERRNO);
}

static void test_cpu_usage(void) {
    struct cpu_usage usage = {0};
    errno = KEPT_ERRNO;
    CHECK(cpu_usage_sample(&usage) == affinity_by_glibc());
    uint64_t start = now_ns();
    while (now_ns() - start < SECOND_NS / 2) {
    }
    CHECK(cpu_usage_sample(&usage) == affinity_by_glibc());
    while (now_ns() - start < SECOND_NS + SECOND_NS / 10) {
    }
    double busy = cpu_usage_sample(&usage);
    /* Not the two CPUs of the mask, and not less than a machine shared with others grants a busy thread. */
    CHECK(busy > 0.4 && busy < 1.3);
    CHECK(cpu_usage_sample(&usage) == busy);

    usage.sampled_wall_ns -= 9 * SECOND_NS;
    double idle = cpu_usage_sample(&usage);
    CHECK(idle < 0.1 && idle >= 0);
    CHECK(errno == KEPT_ERRNO);
}

static void test_cpu_clock_backwards(void) {
    struct cpu_usage ahead = {.sampled_wall_ns = now_ns() + 1000 * SECOND_NS, .cpus = 99};
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());
    CHECK(ahead.sampled_wall_ns <= now_ns());
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());

    struct cpu_usage used = {
        .sampled_wall_ns = now_ns() - 2 * SECOND_NS, .sampled_cpu_ns = UINT64_MAX, .cpus = 99};
    CHECK(cpu_usage_sample(&used) == affinity_by_glibc());
    CHECK(used.sampled_cpu_ns < UINT64_MAX);
}

/* Anonymous memory in small pages, as heaps have it where huge pages are not asked for. */
static unsigned char *map_pages(size_t pages) {
    void *memory = mmap(NULL, pages * page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    madvise(memory, pages * page_bytes, MADV_NOHUGEPAGE); /* EINVAL: a kernel without them */
    return memory;
}

static bool is_resident(const unsigned char *page) {
    unsigned char resident;
    CHECK(mincore((void *)page, 1, &resident) == 0);
    return (resident & 1) != 0;
}

static bool holds(const unsigned char *page, unsigned char value) {
    for (size_t i = 0; i < page_bytes; i++) {
        if (page[i] != value) {
            return false;
        }
    }
    return true;
}

#define RANGES      40
#define RANGE_PAGES 3 /* with one page between two ranges */

struct field {
    unsigned char *pages;
    struct iovec ranges[RANGES];
};

/* Every page is touched; the last page of four belongs to no range. */
static struct field make_field(void) {
    struct field field = {.pages = map_pages((size_t)RANGES * (RANGE_PAGES + 1))};
    memset(field.pages, 0xA5, (size_t)RANGES * (RANGE_PAGES + 1) * page_bytes);
    for (size_t i = 0; i < RANGES; i++) {
        field.ranges[i].iov_base = field.pages + i * (RANGE_PAGES + 1) * page_bytes;
        field.ranges[i].iov_len = RANGE_PAGES * page_bytes;
    }
    return field;
}

/* Exactly the ranges [from, to) are purged. */
static void check_purged(const struct field *field, size_t from, size_t to) {
    for (size_t i = 0; i < (size_t)RANGES * (RANGE_PAGES + 1); i++) {
        size_t range = i / (RANGE_PAGES + 1);
        bool purged = i % (RANGE_PAGES + 1) < RANGE_PAGES && range >= from && range < to;
        const unsigned char *page = field->pages + i * page_bytes;
        CHECK(is_resident(page) == !purged); /* first: the next line may make it resident */
        CHECK(holds(page, purged ? 0 : 0xA5));
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

/* process_madvise fails with `error`, or only on the caller's own PIDFD_SELF if that is wanted. */
static void deny_vectored(unsigned error, bool only_pidfd_self) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_madvise, 0, 3),
        /* The low half of the first argument is below zero: no descriptor. */
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, only_pidfd_self ? 0x80000000U : 0U, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
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
    return syscall(SYS_mlock, page, page_bytes) == 0;
}

#define LOCKED 7

/* A range with a locked page stops the purge; what lies before it is done, what lies behind is not begun. */
static void purge_up_to_locked(size_t page_of_range) {
    struct field field = make_field();
    struct field before = field;
    CHECK(lock_page((char *)field.ranges[LOCKED].iov_base + page_of_range * page_bytes));
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
    CHECK_EQUAL(purge_current_method(), PURGE_UNKNOWN);
    check_purged(&field, 0, 0);
    check_all_purged();
}

/* The kernel's own word, by the calls that the library would make. */
static bool kernel_has_vectored(void) {
    unsigned char *page = map_pages(1);
    struct iovec range = {page, page_bytes};
    int self = (int)syscall(SYS_pidfd_open, getpid(), 0);
    bool has = self >= 0 && syscall(SYS_process_madvise, self, &range, 1, MADV_DONTNEED, 0) > 0;
    close(self);
    return has;
}

#define FIELD_PAGES (2 * RESIDENCY_WINDOW_PAGES + 5)

static unsigned char scratch[RESIDENCY_WINDOW_PAGES];

static struct residency tail_of(const unsigned char *start, size_t pages, size_t max_resident) {
    errno = KEPT_ERRNO;
    struct residency tail = residency_of_tail(start, pages * page_bytes, page_bytes, max_resident, scratch);
    CHECK(errno == KEPT_ERRNO);
    return tail;
}

/* The answer by the definition: as far from the end as the resident pages allow. */
static struct residency expected_tail(const bool *touched, size_t pages, size_t max_resident) {
    struct residency tail = {0};
    while (pages > 0) {
        size_t more = touched[--pages] ? page_bytes : 0;
        if (tail.resident_bytes + more > max_resident) {
            break;
        }
        tail.resident_bytes += more;
        tail.suffix_bytes += page_bytes;
    }
    return tail;
}

static void check_tail(const unsigned char *start, const bool *touched, size_t pages, size_t max_resident) {
    struct residency expected = expected_tail(touched, pages, max_resident);
    struct residency tail = tail_of(start, pages, max_resident);
    CHECK_EQUAL(tail.suffix_bytes, expected.suffix_bytes);
    CHECK_EQUAL(tail.resident_bytes, expected.resident_bytes);
}

static void test_residency(void) {
    static bool touched[FIELD_PAGES];
    unsigned char *pages = map_pages(FIELD_PAGES);

    struct residency none = tail_of(pages, FIELD_PAGES, 0);
    CHECK_EQUAL(none.suffix_bytes, FIELD_PAGES * page_bytes);
    CHECK_EQUAL(none.resident_bytes, 0);
    CHECK_EQUAL(tail_of(pages, 0, SIZE_MAX).suffix_bytes, 0);

    size_t resident = 0;
    for (size_t i = 0; i < FIELD_PAGES; i++) {
        /* Irregular, on both sides of each edge of a window, and with long gaps. */
        bool edge = i % RESIDENCY_WINDOW_PAGES < 2 || (FIELD_PAGES - i) % RESIDENCY_WINDOW_PAGES < 2;
        touched[i] = edge || i * i % 97 == 4 || (i > 5000 && i < 5300);
        if (touched[i]) {
            pages[i * page_bytes] = 1;
            resident++;
        }
    }
    for (size_t limit = 0; limit <= resident + 1; limit++) {
        check_tail(pages, touched, FIELD_PAGES, limit * page_bytes);
    }
    check_tail(pages, touched, FIELD_PAGES, page_bytes - 1);
    check_tail(pages, touched, FIELD_PAGES, 3 * page_bytes + page_bytes / 2);
    check_tail(pages, touched, FIELD_PAGES, SIZE_MAX);
    for (size_t length = 1; length < FIELD_PAGES; length += 131) {
        check_tail(pages, touched, length, 10 * page_bytes);
        check_tail(pages, touched, length, SIZE_MAX);
    }
    CHECK_EQUAL(tail_of(pages, FIELD_PAGES, SIZE_MAX).resident_bytes, resident * page_bytes);

    madvise(pages, FIELD_PAGES * page_bytes, MADV_DONTNEED);
    CHECK_EQUAL(tail_of(pages, FIELD_PAGES, 0).suffix_bytes, FIELD_PAGES * page_bytes);
}

/* Where the kernel does not say (here: ENOMEM), the caution is to count every page. */
static void test_residency_unknown(void) {
    unsigned char *pages = map_pages(FIELD_PAGES);
    CHECK(munmap(pages, FIELD_PAGES * page_bytes) == 0);
    struct residency tail = tail_of(pages, FIELD_PAGES, 5 * page_bytes);
    CHECK_EQUAL(tail.suffix_bytes, 5 * page_bytes);
    CHECK_EQUAL(tail.resident_bytes, 5 * page_bytes);
    tail = tail_of(pages, FIELD_PAGES, SIZE_MAX);
    CHECK_EQUAL(tail.suffix_bytes, FIELD_PAGES * page_bytes);
    CHECK_EQUAL(tail.resident_bytes, FIELD_PAGES * page_bytes);
}

int main(void) {
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    has_vectored = kernel_has_vectored();
    printf("process_madvise on oneself: %s\n", has_vectored ? "yes" : "no");

    in_child(test_affinity);
    in_child(test_cpu_usage);
    test_cpu_clock_backwards();
    in_child(test_purge);
    in_child(test_purge_denied_eperm);
    in_child(test_purge_denied_enosys);
    in_child(test_purge_denied_later);
    in_child(test_purge_by_descriptor);
    in_child(purge_in_child_of_purger);
    in_child(test_purge_in_child_by_descriptor);
    in_child(test_purge_locked);
    in_child(test_purge_locked_denied);
    in_child(test_purge_locked_first);
    test_residency();
    test_residency_unknown();
    return 0;
}
