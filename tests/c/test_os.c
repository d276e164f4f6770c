/* The system calls of src/os/: their results, and their effects on memory. */
#include "os/address_range.h"
#include "os/cgroup.h"
#include "os/clock.h"
#include "os/cpus.h"
#include "os/file.h"
#include "os/filters.h"
#include "os/memory.h"
#include "os/purge.h"
#include "os/residency.h"
#include "os/rseq.h"
#include "os/syscall.h"
#include "os/text.h"
#include "os/thread.h"
#include "os/vm.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>

#include "check.h"
#include "test_clock.h"

#define KEPT_ERRNO 1234 /* none of the system's */
#define SECOND_NS  1000000000ULL

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif
#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

static size_t page_bytes;

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

static void use_cpus(double cpus, uint64_t ns) {
    clock_advance(ns);
    clock_use_cpu((uint64_t)(cpus * (double)ns), 0);
}

/* A filter that is added while a thread measures forbids the clock that it began with. */
static void test_stopwatch(void) {
    clock_stop();
    struct stopwatch watch = stopwatch_start();
    clock_use_cpu(0, 5 * CLOCK_MS);
    clock_advance(100 * CLOCK_MS);
    CHECK_EQUAL(stopwatch_ns(&watch), 5 * CLOCK_MS);
    filters_set(FILTERS_ADDED);
    CHECK_EQUAL(stopwatch_ns(&watch), 0);
    watch = stopwatch_start();
    clock_advance(7 * CLOCK_MS);
    CHECK_EQUAL(stopwatch_ns(&watch), 7 * CLOCK_MS);
}

static void test_cpu_usage(void) {
    struct cpu_usage usage = {0};
    double all = affinity_by_glibc();
    clock_stop();
    errno = KEPT_ERRNO;
    CHECK(cpu_usage_sample(&usage) == all);
    use_cpus(0.25, SECOND_NS / 2);
    CHECK(cpu_usage_sample(&usage) == all);
    use_cpus(0.25, SECOND_NS / 2 - 1);
    CHECK(cpu_usage_sample(&usage) == all); /* until a first full second has passed */
    use_cpus(0.25, 1);
    CHECK(fabs(cpu_usage_sample(&usage) - 0.25) < 1e-6);
    /* Over the time that has passed since, once that is a second again. */
    use_cpus(1, SECOND_NS - 1);
    CHECK(fabs(cpu_usage_sample(&usage) - 0.25) < 1e-6);
    use_cpus(2, 2 * SECOND_NS + 1);
    double busy = cpu_usage_sample(&usage);
    CHECK(fabs(busy - 5.0 / 3) < 1e-6);
    CHECK(cpu_usage_sample(&usage) == busy);
    use_cpus(0, 9 * SECOND_NS);
    CHECK(cpu_usage_sample(&usage) == 0);
    CHECK(errno == KEPT_ERRNO);
}

static uint64_t process_ns(void) {
    struct timespec used;
    CHECK(clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0);
    return (uint64_t)used.tv_sec * SECOND_NS + (uint64_t)used.tv_nsec;
}

/* By the kernel's own clocks: a process that has used so much CPU time has, in its sample, too. */
static void test_cpu_usage_of_this_process(void) {
    struct cpu_usage usage = {0};
    uint64_t start = process_ns();
    cpu_usage_sample(&usage);
    CHECK(usage.sampled_cpu_ns >= start && usage.sampled_cpu_ns <= process_ns());
    while (process_ns() - usage.sampled_cpu_ns < SECOND_NS / 50) {
    }
    struct cpu_usage before = usage;
    usage.sampled_wall_ns -= SECOND_NS; /* as if it had idled before */
    uint64_t least = process_ns() - before.sampled_cpu_ns;
    double cpus = cpu_usage_sample(&usage);
    uint64_t most = process_ns() - before.sampled_cpu_ns;
    double seconds = 1 + (double)(usage.sampled_wall_ns - before.sampled_wall_ns) / SECOND_NS;
    CHECK(usage.sampled_wall_ns >= before.sampled_wall_ns);
    CHECK(cpus * seconds * SECOND_NS >= (double)least - 1 && cpus * seconds * SECOND_NS <= (double)most + 1);
}

static void test_cpu_clock_backwards(void) {
    clock_stop();
    struct cpu_usage ahead = {.sampled_wall_ns = clock_now_ns() + 1000 * SECOND_NS, .cpus = 99};
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());
    CHECK_EQUAL(ahead.sampled_wall_ns, clock_now_ns());
    CHECK(cpu_usage_sample(&ahead) == affinity_by_glibc());

    struct cpu_usage used = {
        .sampled_wall_ns = clock_now_ns() - 2 * SECOND_NS, .sampled_cpu_ns = UINT64_MAX, .cpus = 99};
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
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
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
    CHECK_EQUAL(purge_current_method(), has_vectored ? PURGE_VECTORED : PURGE_SINGLE);
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

#define FIELD_PAGES (2 * RESIDENCY_CHUNK_PAGES + 5)

static unsigned char scratch[RESIDENCY_CHUNK_PAGES];

static struct residency tail_of(const unsigned char *start, size_t pages, size_t max_resident) {
    errno = KEPT_ERRNO;
    struct residency tail = residency_of_tail(start, pages * page_bytes, max_resident, scratch);
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
        bool edge = i % RESIDENCY_CHUNK_PAGES < 2 || (FIELD_PAGES - i) % RESIDENCY_CHUNK_PAGES < 2;
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

/* ---- address space ---- */

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

/* Mappings that the range lies in. */
static size_t count_mappings(const void *base, size_t bytes) {
    static char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    size_t found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        uintptr_t last = strtoull(end + 1, NULL, 16);
        found += first < (uintptr_t)base + bytes && last > (uintptr_t)base;
    }
    fclose(maps);
    return found;
}

static void test_reserve(void) {
    errno = KEPT_ERRNO;
    CHECK_EQUAL(vm_page_size(), page_bytes);
    char *base = vm_reserve(8 * MIB);
    CHECK(base != NULL);
    CHECK_EQUAL((uintptr_t)base % page_bytes, 0);
    CHECK(!is_readable(base) && !is_readable(base + 8 * MIB - 1));
    CHECK(vm_commit(base + MIB, page_bytes));
    CHECK(!is_readable(base + MIB - 1) && is_readable(base + MIB) && !is_readable(base + MIB + page_bytes));
    base[MIB] = 1;
    vm_release(base, 8 * MIB);
    CHECK(!is_readable(base + MIB));
    CHECK(vm_reserve((size_t)1 << 60) == NULL);
    CHECK(vm_reserve(SIZE_MAX - page_bytes + 1) == NULL);
    CHECK(!vm_commit(NULL, page_bytes));
    /* Sizes are rounded up to pages, between two that are not accessible. */
    base = vm_map(page_bytes + 1);
    CHECK(base != NULL && is_readable(base) && is_readable(base + page_bytes));
    CHECK(!is_readable(base - 1) && !is_readable(base + 2 * page_bytes));
    base[2 * page_bytes - 1] = 1;
    vm_release(base, page_bytes + 1);
    CHECK(!is_readable(base) && !is_readable(base + page_bytes));
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
        CHECK(region.committed >= committed && region.committed % page_bytes == 0);
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
    limit.rlim_cur = data_bytes() + 16 * page_bytes;
    CHECK(setrlimit(RLIMIT_DATA, &limit) == 0);
    CHECK(address_range_reach(&region, committed + 1));
    CHECK_EQUAL(region.committed, committed + page_bytes);
    region.base[committed] = 1;
    CHECK(!address_range_reach(&region, committed + MIB));
    CHECK_EQUAL(region.committed, committed + page_bytes);
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
        CHECK(holds(pages + i * page_bytes, (unsigned char)(first == 0 ? 0 : first + (int)i)));
    }
}

static void fill_pages(unsigned char *pages, size_t count, int first) {
    for (size_t i = 0; i < count; i++) {
        memset(pages + i * page_bytes, first + (int)i, page_bytes);
    }
}

/* Both ranges within one mapping, as in a heap. */
static void test_move_and_renew(void) {
    size_t bytes = MOVED_PAGES * page_bytes;
    unsigned char *base = vm_reserve(10 * bytes);
    CHECK(base != NULL && vm_commit(base, 10 * bytes));
    unsigned char *from = base + bytes;
    unsigned char *to = base + 5 * bytes;
    fill_pages(base, 3 * MOVED_PAGES, 1);
    fill_pages(base + 4 * bytes, 3 * MOVED_PAGES, 101);
    errno = KEPT_ERRNO;
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
    size_t bytes = MOVED_PAGES * page_bytes;
    unsigned char *base = vm_reserve(4 * bytes);
    CHECK(base != NULL && vm_commit(base, 4 * bytes));
    unsigned char *to = base + 2 * bytes;
    fill_pages(base, MOVED_PAGES, 1);
    fill_pages(to, MOVED_PAGES, 101);
    CHECK(madvise(base + 9 * page_bytes, page_bytes, MADV_DONTFORK) == 0);
    CHECK(count_mappings(base, bytes) > 1);
    bool moved = vm_move_pages(base, to, bytes);
    printf("pages of several mappings are moved: %s\n", moved ? "yes" : "no");
    CHECK(is_readable(to) && is_readable(to + bytes - 1));
    check_pages(to, MOVED_PAGES, moved ? 1 : 101);
    check_pages(base, MOVED_PAGES, moved ? 0 : 1);
    vm_release(base, 4 * bytes);
}

/* ---- files, text, CPUs ---- */

static char folder[] = "/tmp/calm-test-os-XXXXXX";

static const char *path_in_folder(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_whole(const char *name, const char *text) {
    int descriptor = open(path_in_folder(name), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(descriptor >= 0);
    CHECK_EQUAL(write(descriptor, text, strlen(text)), (ssize_t)strlen(text));
    close(descriptor);
}

static void remove_file(const char *name) {
    unlink(path_in_folder(name));
}

static void test_file(void) {
    char text[16];
    write_whole("file", "twelve bytes");
    errno = KEPT_ERRNO;
    int lowest = lowest_free_descriptor();
    CHECK_EQUAL(file_read(path_in_folder("file"), text, sizeof text), 12);
    CHECK(strcmp(text, "twelve bytes") == 0);
    CHECK_EQUAL(file_read(path_in_folder("file"), text, 7), 6);
    CHECK(strcmp(text, "twelve") == 0);
    CHECK_EQUAL(file_read(path_in_folder("none"), text, sizeof text), -1L);
    CHECK_EQUAL(file_read(folder, text, sizeof text), -1L);
    write_whole("file", "");
    CHECK(file_read(path_in_folder("file"), text, sizeof text) <= 0);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    remove_file("file");
}

static void test_text(void) {
    static const uintptr_t values[] = {1, 9, 10, 15, 16, 0xabc, 0xdeadbeef, 0x7fffffffffff, UINTPTR_MAX};
    static struct text text;
    char expected[64];
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++) {
        text.length = 0;
        text_format(&text, "%p", (void *)values[i]);
        int length = snprintf(expected, sizeof expected, "%p", (void *)values[i]);
        CHECK_EQUAL(text.length, length);
        CHECK(memcmp(text.bytes, expected, text.length) == 0);
    }
    text.length = 0;
    text_format(&text, "%p", NULL);
    CHECK(text.length == 3 && memcmp(text.bytes, "0x0", 3) == 0);

    text.length = 0;
    text_format(&text, "%u,%lu,", 0U, UINT64_MAX);
    text_hundredths(&text, 1205);
    text_json_string(&text, "a\"b\\c\nd");
    static const char all[] = "0,18446744073709551615,12.05\"a\\\"b\\\\c d\"";
    CHECK_EQUAL(text.length, sizeof all - 1);
    CHECK(memcmp(text.bytes, all, text.length) == 0);
    while (text.length < TEXT_MAX_BYTES) {
        text_format(&text, "no more than fits ");
    }
    text_format(&text, "%u", 1U);
    CHECK_EQUAL(text.length, TEXT_MAX_BYTES);

    text.length = 0;
    text_format(&text, "%s: %u of %lu, %zu%% at %p\n", "part", 7U, UINT64_MAX, (size_t)12, (void *)0xabc);
    static const char formatted[] = "part: 7 of 18446744073709551615, 12% at 0xabc\n";
    CHECK_EQUAL(text.length, sizeof formatted - 1);
    CHECK(memcmp(text.bytes, formatted, text.length) == 0);
    text.length = 0;
    text_format(&text, "%.*s|%.*s|%.*s", 2, "cut", 9, "whole", 0, "none");
    CHECK(strcmp(text.bytes, "cu|whole|") == 0);
    errno = KEPT_ERRNO;
    text_write(&text, -1);
    CHECK_EQUAL(errno, KEPT_ERRNO);
}

static void test_print(void) {
    char path[8];
    CHECK(text_print(path, sizeof path, "/a/%u", 123U) == path && strcmp(path, "/a/123") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s", "123456"), "/123456") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s", "1234567"), "") == 0);
    CHECK(strcmp(text_print(path, sizeof path, "/%s%u", "1234567", 8U), "") == 0);
}

static void test_parse(void) {
    uint64_t number;
    static const char *const rests[] = {"", "x", "-1", " 2", "\n"};
    static const uint64_t values[] = {0, 9, 10, 4711, UINT64_MAX - 1, UINT64_MAX};
    for (size_t i = 0; i < sizeof rests / sizeof rests[0]; i++) {
        for (size_t j = 0; j < sizeof values / sizeof values[0]; j++) {
            char text[64];
            int digits = snprintf(text, sizeof text, "%llu", (unsigned long long)values[j]);
            strcpy(text + digits, rests[i]);
            CHECK(parse_number(text, &number) == text + digits);
            CHECK_EQUAL(number, values[j]);
        }
        if (rests[i][0] != '4') {
            CHECK(parse_number(rests[i], &number) == rests[i] && number == 0);
        }
    }
    static const char *const large[] = {"18446744073709551616", "18446744073709551620",
                                        "99999999999999999999999"};
    for (size_t i = 0; i < sizeof large / sizeof large[0]; i++) {
        CHECK(*parse_number(large[i], &number) == '\0' && number == UINT64_MAX);
    }
    static const char stat[] = "12 (a) b) (c) S 1 22 333\n";
    CHECK(strcmp(parse_stat_field(stat, 0), "S 1 22 333\n") == 0);
    CHECK(strcmp(parse_stat_field(stat, 2), "22 333\n") == 0);
    CHECK(*parse_stat_field(stat, 4) == '\0' && *parse_stat_field("12 (a", 0) == '\0');
}

static uint64_t named_number(const char *content, const char *name) {
    uint64_t number = UINT64_MAX;
    write_whole("file", content);
    errno = KEPT_ERRNO;
    file_read_named_numbers(path_in_folder("file"), &name, &number, 1);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return number;
}

static void test_named_numbers(void) {
    CHECK_EQUAL(named_number("MemTotal:   12 kB", "MemTotal"), 12);
    CHECK_EQUAL(named_number("anon 34", "anon"), 34);
    CHECK_EQUAL(named_number("anon_thp 34", "anon"), UINT64_MAX);
    CHECK_EQUAL(named_number("ano", "anon"), UINT64_MAX);
    remove_file("file");
}

static bool join_part(void *context, const char *part) {
    char *all = context;
    strcat(strcat(all, part), "|");
    return strcmp(part, "stop") != 0;
}

static void check_parts(const char *content, const char *expected) {
    char all[3000] = "";
    write_whole("file", content);
    errno = KEPT_ERRNO;
    CHECK(file_each_part(path_in_folder("file"), ',', join_part, all));
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(strcmp(all, expected) == 0);
}

static void test_parts(void) {
    char all[8] = "";
    int lowest = lowest_free_descriptor();
    CHECK(!file_each_part(path_in_folder("none"), ',', join_part, all) && *all == '\0');
    CHECK(!file_each_part(folder, ',', join_part, all) && *all == '\0');
    check_parts("", "");
    check_parts("a", "a|");
    check_parts("a,b,,c\n", "a|b||c\n|");
    check_parts(",a,", "|a|");
    check_parts("a,stop,b", "a|stop|");
    static char content[8 * FILE_MAX_PART];
    static char expected[8 * FILE_MAX_PART];
    for (size_t length = FILE_MAX_PART - 3; length < FILE_MAX_PART + 3; length++) {
        /* Those that fit are whole wherever they begin, and those that do not are left out. */
        bool fits = length < FILE_MAX_PART - 1;
        memset(content, 'x', length);
        strcpy(content + length, ",y,stop,z");
        memset(expected, 'x', length);
        strcpy(expected + (fits ? length : 0), fits ? "|y|stop|" : "y|stop|");
        check_parts(content, expected);
    }
    memset(content, 'x', sizeof content - 1);
    check_parts(content, "");
    strcpy(content + sizeof content - 3, ",y");
    check_parts(content, "y|");
    write_whole("file", "4711 9\n");
    CHECK_EQUAL(file_read_number(path_in_folder("file")), 4711);
    write_whole("file", "max\n");
    CHECK_EQUAL(file_read_number(path_in_folder("file")), UINT64_MAX);
    CHECK_EQUAL(file_read_number(path_in_folder("none")), UINT64_MAX);
    CHECK_EQUAL(lowest_free_descriptor(), lowest);
    remove_file("file");
}

static void test_cpus(void) {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    unsigned possible = cpus_possible();
    CHECK(possible >= (unsigned)sysconf(_SC_NPROCESSORS_CONF));
    for (unsigned cpu = possible; cpu < CPU_SETSIZE; cpu++) {
        CHECK(!CPU_ISSET(cpu, &set));
    }
    CHECK(possible <= 8192);
    CHECK(nodes_possible() >= 1 && nodes_possible() <= 1024);
    CHECK(cpus_listed() >= cpu_affinity_count() && cpus_listed() <= cpus_possible());
    struct rseq_offsets place = rseq_find();
    if (place.usable) {
        for (int i = 0; i < 1000; i++) {
            const char *number = (const char *)thread_pointer() + place.cpu_number;
            CHECK(*(const volatile uint32_t *)(const void *)number < possible);
        }
        CHECK(rseq_restart_all());
    }
}

/* ---- control groups ---- */

static const char *const group_folders[] = {
    "proc",
    "proc/self",
    "proc/pressure",
    "sys",
    "sys/fs",
    "sys/fs/cgroup",
    "sys/fs/cgroup/a",
    "sys/fs/cgroup/a/b",
    "sys/fs/cgroup/a/b/c",
    "sys/fs/cgroup/cpu",
    "sys/fs/cgroup/cpu/d",
    "sys/fs/cgroup/memory",
    "sys/fs/cgroup/memory/d",
    "sys/fs/cgroup/memory/d/e",
};
#define GROUP_FOLDERS (sizeof group_folders / sizeof group_folders[0])

static void make_groups(void) {
    for (size_t i = 0; i < GROUP_FOLDERS; i++) {
        CHECK(mkdir(path_in_folder(group_folders[i]), 0700) == 0);
    }
}

/* With all files that a test may have made in them. */
static void remove_groups(void) {
    static const char *const made[] = {
        "cpu.max",         "cpu.cfs_quota_us",      "cpu.cfs_period_us",     "cgroup",
        "memory.max",      "memory.high",           "memory.current",        "memory.stat",
        "memory.pressure", "memory.usage_in_bytes", "memory.limit_in_bytes", "meminfo",
        "memory"};
    for (size_t i = GROUP_FOLDERS; i-- > 0;) {
        for (size_t j = 0; j < sizeof made / sizeof made[0]; j++) {
            char path[128];
            snprintf(path, sizeof path, "%s/%s", group_folders[i], made[j]);
            unlink(path_in_folder(path));
        }
        CHECK(rmdir(path_in_folder(group_folders[i])) == 0);
    }
}

/* A file of a group's folder; NULL: there is none. */
static void set_group(const char *group, const char *name, const char *text) {
    char path[128];
    snprintf(path, sizeof path, "sys/fs/cgroup/%s/%s", group, name);
    if (text != NULL) {
        write_whole(path, text);
    } else {
        unlink(path_in_folder(path));
    }
}

static uint64_t group_limit;

static uint64_t group_room(void) {
    errno = KEPT_ERRNO;
    uint64_t room = cgroup_available_bytes(folder, &group_limit);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return room;
}

static uint64_t room_with(const char *current, const char *max, const char *high, const char *pressure) {
    set_group("a/b/c", "memory.current", current);
    set_group("a/b/c", "memory.max", max);
    set_group("a/b/c", "memory.high", high);
    set_group("a/b/c", "memory.pressure", pressure);
    return group_room();
}

#define SOME(average)                                                                    \
    "some avg10=" average " avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 " \
    "avg300=0.00 total=0\n"

/* Of version 2: the nearest limit of the group and those above it. */
static void test_memory_of_groups(void) {
    make_groups();
    CHECK_EQUAL(group_room(), UINT64_MAX);
    write_whole("proc/self/cgroup", "0::/a/b/c\n");
    CHECK_EQUAL(room_with(NULL, NULL, NULL, NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("800\n", "1000\n", "max\n", NULL), 100);
    CHECK_EQUAL(room_with("900\n", "1000\n", "max\n", NULL), 0);
    CHECK_EQUAL(room_with("901\n", "1000\n", "max\n", NULL), 0);
    CHECK_EQUAL(room_with("800\n", "max\n", "1000\n", NULL), 100);
    CHECK_EQUAL(room_with("800\n", "5000\n", "1000\n", NULL), 100); /* the lower one counts */
    CHECK_EQUAL(room_with("800\n", "1000\n", "5000\n", NULL), 100);
    CHECK_EQUAL(room_with("999999999999\n", "max\n", "max\n", NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("800\n", "1000\n", NULL, NULL), 100);
    CHECK_EQUAL(room_with("800\n", NULL, "1000\n", NULL), 100);
    CHECK_EQUAL(room_with("800\n", NULL, NULL, NULL), UINT64_MAX);
    CHECK_EQUAL(room_with(NULL, "1000\n", "1000\n", NULL), UINT64_MAX);
    CHECK_EQUAL(room_with("0\n", "17179869184\n", "max\n", NULL), 17179869184 / 10 * 9);
    CHECK_EQUAL(room_with("1\n", "0\n", "max\n", NULL), 0);

    /* What the kernel gives up by itself. */
    room_with("1500\n", "2000\n", "max\n", NULL);
    set_group("a/b/c", "memory.stat",
              "anon 1\nfile 900\ninactive_file 200\nactive_file 100\nslab_reclaimable 50\n"
              "total_inactive_file 5000\n");
    CHECK_EQUAL(group_room(), 1800 - (1500 - 350));
    set_group("a/b/c", "memory.stat", "inactive_file 5000\n");
    CHECK_EQUAL(group_room(), 1800);
    set_group("a/b/c", "memory.stat", NULL);

    /* Those above, and the topmost. */
    room_with("10\n", "1000\n", "max\n", NULL);
    set_group("a", "memory.current", "500\n");
    set_group("a", "memory.max", "1000\n");
    CHECK_EQUAL(group_room(), 400);
    set_group("", "memory.current", "700\n");
    set_group("", "memory.max", "1000\n");
    CHECK_EQUAL(group_room(), 200);
    write_whole("proc/self/cgroup", "0::/none of these\n");
    CHECK_EQUAL(group_room(), 200);
    set_group("", "memory.max", NULL);
    set_group("a", "memory.max", NULL);
    write_whole("proc/self/cgroup", "0::/a/b/c\n");

    /* Waiting for memory, in the group itself. */
    static const char *low[] = {SOME("0.00"), SOME("0.99"), SOME("1.00"), SOME("9.99"), "", "nonsense"};
    static const char *much[] = {SOME("10.00"), SOME("10.01"), SOME("55.50"), SOME("100.00")};
    for (size_t i = 0; i < sizeof low / sizeof low[0]; i++) {
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", low[i]), 899);
    }
    for (size_t i = 0; i < sizeof much / sizeof much[0]; i++) {
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", much[i]), 0);
        CHECK_EQUAL(room_with(NULL, NULL, NULL, much[i]), 0);
        set_group("a", "memory.pressure", much[i]);
        CHECK_EQUAL(room_with("1\n", "1000\n", "max\n", NULL), 899);
        set_group("a", "memory.pressure", NULL);
    }
    remove_groups();
}

/* Of version 1, alone and beside version 2. */
static void test_memory_of_first_groups(void) {
    make_groups();
    set_group("memory/d/e", "memory.usage_in_bytes", "500\n");
    set_group("memory/d/e", "memory.limit_in_bytes", "9223372036854771712\n");
    write_whole("proc/self/cgroup", "7:cpuset:/d/e\n4:memory:/d/e\n1:name=systemd:/\n");
    CHECK(group_room() > (uint64_t)1 << 62); /* no limit */
    set_group("memory/d/e", "memory.limit_in_bytes", "1000\n");
    CHECK_EQUAL(group_room(), 400);
    set_group("memory/d/e", "memory.stat", "inactive_file 1\ntotal_inactive_file 90\ntotal_active_file 10\n");
    CHECK_EQUAL(group_room(), 500);
    set_group("memory/d", "memory.usage_in_bytes", "800\n");
    set_group("memory/d", "memory.limit_in_bytes", "1000\n");
    CHECK_EQUAL(group_room(), 100);
    set_group("a", "memory.current", "850\n");
    set_group("a", "memory.max", "1000\n");
    write_whole("proc/self/cgroup", "4:memory:/d/e\n0::/a/b\n");
    CHECK_EQUAL(group_room(), 50);
    write_whole("proc/self/cgroup", "6:memoryx:/d/e\n5:name=memory:/d\n");
    CHECK_EQUAL(group_room(), UINT64_MAX);

    /* As many groups, and as long names, as there are. */
    FILE *file = fopen(path_in_folder("proc/self/cgroup"), "w");
    CHECK(file != NULL);
    for (int i = 0; i < 100; i++) {
        fprintf(file, "%d:name=%0*d:/%0*d\n", i + 100, i, 0, 10 * i, 0);
    }
    fprintf(file, "4:memory:/d/e");
    CHECK(fclose(file) == 0);
    CHECK_EQUAL(group_room(), 100);
    remove_groups();
}

static size_t room_limit;

static size_t room_of(const char *meminfo, const char *pressure) {
    write_whole("proc/meminfo", meminfo);
    write_whole("proc/pressure/memory", pressure);
    errno = KEPT_ERRNO;
    size_t room = memory_available_bytes(folder, &room_limit);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return room;
}

static void test_memory_of_machine(void) {
    make_groups();
    CHECK_EQUAL(memory_available_bytes(folder, &room_limit), SIZE_MAX);
    CHECK_EQUAL(room_limit, memory_total_bytes());
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\nMemFree: 3 kB\nMemAvailable:   500 kB\n", ""), 450 << 10);
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\nMemAvailable:   50 kB\n", ""), 0);
    CHECK_EQUAL(room_of("MemTotal:   1000 kB\n", ""), SIZE_MAX);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 50 kB\nHugetlb: 900 kB\n", ""), 45 << 10);
    /* Pressure while there is much available is of other kinds of memory. */
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", SOME("50.00")), 450 << 10);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 199 kB\n", SOME("9.00")), 149 << 10);
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 199 kB\n", SOME("50.00")), 0);
    write_whole("proc/self/cgroup", "0::/a\n");
    set_group("a", "memory.current", "1000\n");
    set_group("a", "memory.max", "10000\n");
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", ""), 8000);
    CHECK_EQUAL(room_limit, 10000);
    set_group("a", "memory.high", "5000\n");
    CHECK_EQUAL(room_of("MemTotal: 1000 kB\nMemAvailable: 500 kB\n", ""), 3500);
    CHECK_EQUAL(room_limit, 5000);
    remove_groups();
    CHECK(memory_available_bytes("", &room_limit) > 0); /* whatever it says of this machine */
}

/* ---- CPU time of control groups ---- */

static double quota_where(const char *groups) {
    write_whole("proc/self/cgroup", groups);
    errno = KEPT_ERRNO;
    double quota = cgroup_cpu_quota(folder);
    CHECK_EQUAL(errno, KEPT_ERRNO);
    return quota;
}

static void test_cpu_quota(void) {
    CHECK(cgroup_cpu_quota(folder) == INFINITY);
    make_groups();
    /* Version 2: the least of the group and those above it. */
    CHECK(quota_where("0::/a/b/c\n") == INFINITY);
    write_whole("sys/fs/cgroup/a/b/c/cpu.max", "max 100000\n");
    CHECK(quota_where("0::/a/b/c\n") == INFINITY);
    write_whole("sys/fs/cgroup/a/b/c/cpu.max", "350000 100000\n");
    CHECK(quota_where("0::/a/b/c\n") == 3.5);
    CHECK(quota_where("0::/a/b/c") == 3.5);
    CHECK(quota_where("0::/a/b\n") == INFINITY);
    CHECK(quota_where("0::/a/b/c/unseen/below\n") == 3.5);
    write_whole("sys/fs/cgroup/a/cpu.max", "50000 20000\n");
    CHECK(quota_where("0::/a/b/c\n") == 2.5);
    CHECK(quota_where("0::/a\n") == 2.5);
    CHECK(quota_where("0::/\n") == INFINITY);
    write_whole("sys/fs/cgroup/a/b/cpu.max", "400000 100000\n");
    CHECK(quota_where("0::/a/b/c\n") == 2.5);
    CHECK(quota_where("0::/a/b (deleted)\n") == 2.5);
    write_whole("sys/fs/cgroup/cpu.max", "150000 100000\n"); /* a container's own group */
    CHECK(quota_where("0::/a/b/c\n") == 1.5);
    CHECK(quota_where("0::/\n") == 1.5);
    CHECK(quota_where("0::/system.slice/none of these\n") == 1.5);
    static const char *const odd[] = {"",          "\n",         "100000",       "100000\n",
                                      "100000 \n", "100000 0\n", "100000 max\n", "x 1\n"};
    for (size_t i = 0; i < sizeof odd / sizeof odd[0]; i++) {
        write_whole("sys/fs/cgroup/cpu.max", odd[i]);
        CHECK(quota_where("0::/a/b/c\n") == 2.5);
    }
    remove_file("sys/fs/cgroup/cpu.max");

    /* Version 1, alone and beside version 2. */
    write_whole("sys/fs/cgroup/cpu/d/cpu.cfs_quota_us", "-1\n");
    write_whole("sys/fs/cgroup/cpu/d/cpu.cfs_period_us", "100000\n");
    CHECK(quota_where("7:cpuset:/d\n4:cpu,cpuacct:/d\n1:name=systemd:/d\n") == INFINITY);
    write_whole("sys/fs/cgroup/cpu/d/cpu.cfs_quota_us", "120000\n");
    CHECK(quota_where("7:cpuset:/d\n4:cpu,cpuacct:/d\n1:name=systemd:/d\n") == 1.2);
    CHECK(quota_where("4:cpuacct,cpu:/d\n") == 1.2);
    CHECK(quota_where("1:cpu:/d/e\n0::/\n") == 1.2);
    CHECK(quota_where("1:cpu:/\n0::/a\n") == 2.5);
    CHECK(quota_where("1:cpu:/d\n0::/a\n") == 1.2);
    CHECK(quota_where("7:cpuset:/d\n6:cpuacct:/d\n5:name=cpu:/d\n4:cpus:/d\n") == INFINITY);
    write_whole("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "90000\n"); /* a container's own */
    write_whole("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(quota_where("4:cpu,cpuacct:/docker/0123456789abcdef\n") == 0.9);
    static const char *const nothing[] = {"",   "\n",      "0",        "0:",        "0::",     "0::\n",
                                          "::", "4:cpu\n", "4:cpu:\n", "4:cpu:d\n", "/a/b/c\n"};
    for (size_t i = 0; i < sizeof nothing / sizeof nothing[0]; i++) {
        CHECK(quota_where(nothing[i]) == INFINITY);
    }

    /* Names too long for any path of ours. */
    static char far[2000];
    memset(far, 'x', sizeof far - 2);
    memcpy(far, "0::/", 4);
    far[sizeof far - 2] = '\n';
    CHECK(quota_where(far) == INFINITY);
    memset(far, '/', sizeof far - 1);
    CHECK(cgroup_cpu_quota(far) == INFINITY);
    CHECK(cgroup_cpu_quota("") > 0); /* whatever it says of this machine */

    remove_groups();
}

/* ---- a bare thread ---- */

#ifndef __SANITIZE_THREAD__ /* whose functions need the C library's thread */

extern char __libc_single_threaded __attribute__((weak));

static struct {
    _Atomic(int) thread;
    _Atomic(int) argument;
    uint64_t blocked;
} seen;

static void note(void *argument) {
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&seen.blocked, sizeof seen.blocked, 0, 0);
    seen.argument = *(int *)argument;
    seen.thread = (int)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    for (;;) {
        os_syscall(SYS_pause, 0, 0, 0, 0, 0, 0);
    }
}

static void test_thread(void) {
    static int argument = 4711;
    static struct thread thread;
    static char text[64];
    char path[64];
    uint64_t before;
    uint64_t after;
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&before, sizeof before, 0, 0);
    errno = KEPT_ERRNO;
    bool was_single = &__libc_single_threaded != NULL && __libc_single_threaded;
    CHECK(thread_start(&thread, note, &argument, (size_t)64 << 10));
    CHECK_EQUAL(errno, KEPT_ERRNO);
    WAIT_UNTIL(seen.thread != 0);
    CHECK_EQUAL(seen.argument, argument);
    CHECK(seen.thread != getpid());
    /* All but the two that cannot be. */
    uint64_t never = (uint64_t)1 << (SIGKILL - 1) | (uint64_t)1 << (SIGSTOP - 1);
    CHECK_EQUAL(seen.blocked | never, UINT64_MAX);
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, (long)&after, sizeof after, 0, 0);
    CHECK_EQUAL(after, before);
    snprintf(path, sizeof path, "/proc/self/task/%d/comm", seen.thread);
    CHECK(file_read(path, text, sizeof text) > 0 && strcmp(text, "calmalloc\n") == 0);
    /* To the C library there is one thread still. */
    CHECK(was_single == (&__libc_single_threaded != NULL && __libc_single_threaded));
    CHECK(kill(getpid(), SIGURG) == 0);
    int status;
    pid_t child = fork();
    if (child == 0) {
        _exit(3);
    }
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 3);
}

/* ---- a thread that ends ---- */

static struct {
    uint32_t id, free_descriptor, capabilities;
    bool own_files;
    int policy;
    struct cpu_set cpus;
} left;

static void leave_all(void *argument) {
    (void)argument;
    left.id = (uint32_t)os_syscall(SYS_gettid, 0, 0, 0, 0, 0, 0);
    left.own_files = thread_leave_files();
    left.free_descriptor = (uint32_t)os_syscall(SYS_openat, AT_FDCWD, (long)"/", O_RDONLY, 0, 0, 0);
    thread_drop_capabilities();
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct held[_LINUX_CAPABILITY_U32S_3];
    os_syscall(SYS_capget, (long)&header, (long)held, 0, 0, 0, 0);
    left.capabilities = held[0].effective | held[0].permitted | held[1].effective | held[1].permitted;
    thread_schedule_normally((const struct cpu_set *)argument);
    left.policy = (int)os_syscall(SYS_sched_getscheduler, 0, 0, 0, 0, 0, 0);
    cpu_affinity(0, &left.cpus);
}

/* Its stack serves the next; what it leaves is still the program's. */
/* All but the one by which setuid(2) reaches each thread: its sender may hold a lock that this thread is
 * about to wait for, and waits for this thread. */
static void test_block_signals(void) {
    uint64_t blocked;
    uint64_t after;
    uint64_t before = thread_block_signals();
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, &blocked, sizeof blocked);
    thread_set_signals(before);
    os_syscall(SYS_rt_sigprocmask, SIG_SETMASK, 0, &after, sizeof after);
    uint64_t open =
        (uint64_t)1 << (SIGKILL - 1) | (uint64_t)1 << (SIGSTOP - 1) | (uint64_t)1 << (SIGRTMIN - 2);
    CHECK_EQUAL(blocked, ~open);
    CHECK_EQUAL(after, before);
}

static void test_thread_leaves(void) {
    struct thread thread = {0};
    struct cpu_set all;
    cpu_affinity(0, &all);
    int before = dup(0);
    CHECK(before >= 0 && close(before) == 0);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0);
    const struct sched_param first = {.sched_priority = 1};
    sched_setscheduler(0, SCHED_FIFO, &first); /* where that is allowed */
    char *memory = NULL;
    for (int i = 0; i < 3; i++) {
        CHECK(thread_is_gone(&thread));
        CHECK(thread_start(&thread, leave_all, &all, (size_t)64 << 10));
        while (!thread_is_gone(&thread)) {
            thread_wait(&thread, 0);
        }
        CHECK(memory == NULL || memory == thread.memory);
        memory = thread.memory;
#ifndef __SANITIZE_ADDRESS__
        CHECK(left.own_files && left.free_descriptor == 0);
#endif
        CHECK_EQUAL(left.capabilities, 0);
        CHECK_EQUAL(left.policy, SCHED_OTHER);
        CHECK(memcmp(&left.cpus, &all, sizeof all) == 0);
    }
#ifndef __SANITIZE_ADDRESS__
    int after = dup(0);
    CHECK(after == before && close(after) == 0);
#endif
    struct cpu_set still;
    cpu_affinity(0, &still);
    CHECK(memcmp(&still, &one, sizeof one) == 0);
}

static void test_thread_refused(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EAGAIN),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
    struct thread thread = {0};
    size_t before = count_mappings(NULL, SIZE_MAX);
    errno = KEPT_ERRNO;
    for (int i = 0; i < 10; i++) {
        CHECK(!thread_start(&thread, note, NULL, (size_t)64 << 10));
    }
    CHECK_EQUAL(errno, KEPT_ERRNO);
    CHECK(count_mappings(NULL, SIZE_MAX) < before + 5);
}

#endif

int main(void) {
    page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    filters_detect();
    has_vectored = kernel_has_vectored();
    printf("process_madvise on oneself: %s\n", has_vectored ? "yes" : "no");

    in_child(test_affinity);
    in_child(test_stopwatch);
    in_child(test_cpu_usage);
    in_child(test_cpu_usage_of_this_process);
    in_child(test_cpu_clock_backwards);
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
    test_residency();
    test_residency_unknown();

    test_reserve();
    test_region();
    in_child(test_region_short_of_memory);
    in_child(test_address_space_limit);
    test_move_and_renew();
    test_move_across_mappings();
    CHECK(mkdtemp(folder) != NULL);
    test_file();
    test_text();
    test_print();
    test_parse();
    test_named_numbers();
    test_parts();
    test_cpus();
    test_memory_of_groups();
    test_memory_of_first_groups();
    test_memory_of_machine();
    test_cpu_quota();
    CHECK(rmdir(folder) == 0);
#ifndef __SANITIZE_THREAD__
    in_child(test_thread);
    test_block_signals();
    in_child(test_thread_leaves);
    in_child(test_thread_refused);
#endif
    return 0;
}
