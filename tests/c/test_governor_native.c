/*
 * The native governor: its limits under either policy and whatever the kernel refuses, its delays while
 * memory cannot be purged, and the effects of trimming and moving. Each test runs in a separate process.
 */
#include "calmalloc.h"

#include "api/allocator.h"
#include "api/options.h"
#include "counter_reader.h"
#include "governor/blocks.h"
#include "governor/check.h"
#include "governor/epoch.h"
#include "governor/flush.h"
#include "governor/governor.h"
#include "governor/helper.h"
#include "governor/large.h"
#include "governor/limit.h"
#include "governor/purger.h"
#include "governor/terms.h"
#include "heap/walk.h"
#include "lost_lock.h"
#include "os/clock.h"
#include "os/filters.h"
#include "os/memory.h"
#include "os/purge.h"
#include "os/residency.h"
#include "os/syscall.h"
#include "policy/hysteresis.h"
#include "policy/retention.h"
#include "test_clock.h"

#include <errno.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#define KIB   1024UL
#define MIB   (1UL << 20)
#define SLOTS 3000

#ifndef SYS_process_madvise
#define SYS_process_madvise 440
#endif

/* How long locked memory cannot be given back, and what is done in each millisecond. */
#define LOCKED_MS     500
#define LOCKED_ROUNDS 40
/* What one step of a program takes: several epochs pass in a run. */
#define STEP_NS 20000U

static size_t steps = 60000;
static size_t page_size;
static unsigned char scratch[RESIDENCY_CHUNK_PAGES];
static unsigned all_cpus; /* that the system may have */
static void *blocks[SLOTS];
static uint64_t random_state = 88172645463325252U;

static size_t below(size_t bound) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % bound;
}

static struct calm_stats stats_now(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, stats.in_use + stats.retained);
    return stats;
}

/* What the machine is said to have left, of 8 GiB; SIZE_MAX: what it has. */
static size_t room_said = SIZE_MAX;

/* How often the memory's room was read, and how often of these while a thread that frees would have had to
 * wait. */
static _Atomic(int) room_reads;
static _Atomic(int) room_reads_locked;

size_t __real_memory_available_bytes(const char *root, size_t *limit);
size_t __wrap_memory_available_bytes(const char *root, size_t *limit);

size_t __wrap_memory_available_bytes(const char *root, size_t *limit) {
    room_reads++;
    if (lock_try(&calm_governor.purge_lock)) {
        lock_release(&calm_governor.purge_lock);
    } else {
        room_reads_locked++;
    }
    if (room_said != SIZE_MAX) {
        *limit = (size_t)8 << 30;
        return room_said;
    }
    return __real_memory_available_bytes(root, limit);
}

static void set(const char *name, const char *value) {
    CHECK_EQUAL(calm_set(name, value), 0);
}

static void *obtain(size_t bytes) {
    char *block = calm_malloc(bytes);
    CHECK(block != NULL);
    for (size_t at = 0; at < bytes; at += page_size) {
        block[at] = 1;
    }
    return block;
}

static void step(size_t number) {
    bool grow = number / 5000 % 2 == 0;
    clock_advance(STEP_NS);
    void **slot = &blocks[below(SLOTS)];
    if (*slot != NULL && (!grow || below(4) == 0)) {
        calm_free(*slot);
        *slot = NULL;
    } else if (*slot == NULL && (grow || below(4) == 0)) {
        size_t dice = below(100);
        *slot = obtain(1 + below(dice < 50 ? 512 : dice < 80 ? 8 * KIB : dice < 95 ? 64 * KIB : 512 * KIB));
    }
}

static void free_all(void) {
    for (size_t i = 0; i < SLOTS; i++) {
        calm_free(blocks[i]);
        blocks[i] = NULL;
    }
}

static size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

/* What the adaptive policy may keep, of table 1. */
#define UNTENDED RETENTION_FOREGROUND_FACTOR
#define TENDED   1e9 /* as much as the program used of late */

/* Table 1 times the band, and the CPUs' hundredths; nobody is asked for less than 16 pages. */
static void check_limit(const struct calm_stats *stats, double min_band, double max_band, double factor) {
    double base = (double)hysteresis_base_bytes(stats->footprint) * factor;
    double cpus = 1 + (double)all_cpus / 100;
    size_t little = max_band > 1 ? RETENTION_FOREGROUND_BYTES : 16 * page_size;
    CHECK((double)stats->retained_limit <= (double)most((size_t)(base * max_band * cpus), little));
    CHECK((double)stats->retained_limit + (double)page_size >= base * min_band);
    CHECK(stats->retained <= stats->retained_limit);
    CHECK(stats->cached <= stats->cached_limit);
}

static void run_for(size_t count, double min_band, double max_band, double factor) {
    uint64_t failures = stats_now().purge_failures;
    for (size_t number = 0; number < count; number++) {
        step(number);
        struct calm_stats stats = stats_now();
        check_limit(&stats, min_band, max_band, factor);
    }
    free_all();
    struct calm_stats stats = stats_now();
    check_limit(&stats, min_band, max_band, factor);
    CHECK(stats.purged > 0 && stats.purge_failures == failures);
}

static void run_within(double min_band, double max_band, double factor) {
    run_for(steps, min_band, max_band, factor);
}

/* Before or after what a test is about: one wave. */
static void run_briefly_within(double min_band, double max_band, double factor) {
    run_for(steps / 5, min_band, max_band, factor);
}

static void test_paper_bound(void) {
    set("test_policy", "paper");
    run_within(1, 1, 1);
    CHECK_EQUAL(stats_now().purges_epoch, 0);
}

static void test_adaptive_bound(void) {
    run_within(1, UNTENDED, 1);
}

static void test_price(void) {
    set("test_policy", "paper");
    set("memory_per_cpu", "1");
    run_within(1, 1, 0.5);
    set("memory_per_cpu", "48");
    run_within(1, 1, 3);
    set("memory_per_cpu", "0");
    struct calm_stats stats = stats_now();
    check_limit(&stats, 0, 1, 0); /* a setting acts at once */
}

/* However they come to be free: also out of the caches, by a trim that would keep everything. */
static void test_bound_after_shedding(void) {
    for (int policy = 0; policy < 2; policy++) {
        set("test_policy", policy == 0 ? "paper" : "adaptive");
        for (size_t bytes = 16; bytes <= 32 * KIB; bytes *= 2) {
            size_t count = 0;
            for (size_t left = 2 * MIB; left > bytes && count < SLOTS; left -= bytes) {
                blocks[count++] = obtain(bytes);
            }
            while (count > 0) {
                calm_free(blocks[--count]);
                blocks[count] = NULL;
            }
        }
        calm_trim(SIZE_MAX);
        struct calm_stats stats = stats_now();
        printf("%s, after a trim that keeps all: %llu KiB retained of %llu KiB\n",
               policy == 0 ? "paper" : "adaptive", (unsigned long long)stats.retained >> 10,
               (unsigned long long)stats.retained_limit >> 10);
        CHECK(stats.retained <= stats.retained_limit);
        calm_trim(0);
    }
}

/* ---- the kernel refuses ---- */

/* process_madvise fails with `error`. */
static void deny_vectored(unsigned error) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_madvise, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof filter[0], .filter = filter};
    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

static void test_denied_from_the_start(void) {
    deny_vectored(EPERM);
    set("test_policy", "paper");
    run_within(1, 1, 1);
    struct calm_stats stats = stats_now();
    CHECK(stats.purge_vectored_calls == 0 && stats.purge_single_calls > 0);
    calm_trim(0);
    CHECK_EQUAL(stats_now().retained, 0);
}

static void test_denied_later(void) {
    run_briefly_within(1, UNTENDED, 1);
    uint64_t before = stats_now().purge_vectored_calls;
    deny_vectored(ENOSYS);
    run_within(1, UNTENDED, 1);
    struct calm_stats stats = stats_now();
    CHECK(stats.purge_vectored_calls == before && stats.purge_single_calls > 0);
    calm_trim(0);
    CHECK_EQUAL(stats_now().retained, 0);
}

static void test_vectored_off(void) {
    set("vectored_purge", "off");
    run_within(1, UNTENDED, 1);
    CHECK_EQUAL(stats_now().purge_vectored_calls, 0);
    set("vectored_purge", "on");
    run_briefly_within(1, UNTENDED, 1);
}

static void check_heap(void) {
    lock_acquire(&calm_governor.purge_lock);
    heap_walk(&calm_governor.heap, NULL, 0);
    lock_release(&calm_governor.purge_lock);
}

/*
 * Locked memory cannot be given back: few attempts, however much is freed, and once it is unlocked all of it
 * goes.
 */
static void refuse(size_t locked_each, size_t locked_bytes) {
    enum { COUNT = 64 };
    set("test_policy", "paper");
    for (size_t i = 0; i < COUNT; i++) {
        blocks[i] = obtain(512 * KIB);
        if (i % locked_each == 0) {
            /* The raw call: sanitizers make mlock do nothing. */
            CHECK(syscall(SYS_mlock, blocks[i], locked_bytes) == 0);
        }
    }
    char *locked[COUNT];
    memcpy(locked, blocks, sizeof locked);
    free_all();
    struct calm_stats before = stats_now();
    CHECK(before.purge_failures > 0);
    for (uint64_t ms = 0; ms < LOCKED_MS; ms++) {
        for (size_t round = 0; round < LOCKED_ROUNDS; round++) {
            void *one = obtain(256 * KIB);
            void *other = obtain(40 * KIB);
            calm_free(one);
            calm_free(other);
        }
        clock_advance(CLOCK_MS);
    }
    struct calm_stats after = stats_now();
    printf("locked: %llu failures at once, %llu more in %d ms, %llu KiB retained of %llu\n",
           (unsigned long long)before.purge_failures,
           (unsigned long long)(after.purge_failures - before.purge_failures), LOCKED_MS,
           (unsigned long long)after.retained >> 10, (unsigned long long)after.retained_limit >> 10);
    /* Ten milliseconds between the first two attempts, and then twice as long each. */
    uint64_t attempts = 4;
    for (uint64_t wait = 10; wait < LOCKED_MS; wait *= 2) {
        attempts++;
    }
    CHECK(after.purge_failures - before.purge_failures <= attempts * COUNT);
    check_heap();

    for (size_t i = 0; i < COUNT; i++) {
        CHECK(syscall(SYS_munlock, locked[i], 512 * KIB) == 0);
    }
    /* Asked for, at once. */
    calm_trim(0);
    CHECK_EQUAL(stats_now().retained, 0);
    check_heap();
    run_briefly_within(1, 1, 1);
}

static void run_steps(void) {
    for (size_t number = 0; number < steps; number++) {
        step(number);
    }
    free_all();
}

static void test_locked_pages(void) {
    refuse(8, page_size);
}

static void test_locked_blocks(void) {
    refuse(1, 512 * KIB);
}

/* All memory locked from the start, as mlockall does it: nothing can be given back, and all goes on. */
static void test_all_locked(void) {
    /* With what sanitizers reserve, too, it would be more than there is. */
    CHECK(syscall(SYS_mlockall, SANITIZED ? MCL_FUTURE : MCL_CURRENT | MCL_FUTURE) == 0);
    run_steps();
    struct calm_stats stats = stats_now();
    printf("all locked: %llu failures\n", (unsigned long long)stats.purge_failures);
    check_heap();
}

/* Without being asked, too: the first look after the wait. */
static void test_unlocked_later(void) {
    set("test_policy", "paper");
    char *locked = obtain(8 * MIB);
    CHECK(syscall(SYS_mlock, locked, 8 * MIB) == 0);
    calm_free(locked);
    CHECK(stats_now().retained > stats_now().retained_limit);
    CHECK(syscall(SYS_munlock, locked, 8 * MIB) == 0);
    for (unsigned ms = 0; stats_now().retained > stats_now().retained_limit; ms++) {
        CHECK(ms < 50); /* two waits of ten milliseconds, and twice as long, and the looks between them */
        clock_advance(CLOCK_MS);
        /* Of sizes that no cache keeps. */
        calm_free(obtain(64 * KIB));
    }
}

/* ---- trimming ---- */

static void test_trim(void) {
    for (size_t number = 0; number < steps / 4; number++) {
        step(number);
    }
    struct calm_stats before = stats_now();
    size_t given = calm_trim(0);
    struct calm_stats after = stats_now();
    CHECK_EQUAL(after.retained, 0);
    CHECK_EQUAL(after.cached, 0);
    CHECK_EQUAL(after.purged - before.purged, given);
    CHECK_EQUAL(calm_trim(0), 0);
    free_all();
    calm_trim(64 * page_size);
    CHECK(stats_now().retained <= 64 * page_size);
    calm_trim(0);
    after = stats_now();
    CHECK_EQUAL(after.footprint, 0);
    check_heap();
}

/* The price of a purge is the CPU time of its thread: others that run in between do not make it dearer. */
static void test_preempted_purge(void) {
    clock_set_cpu_step(0);
    for (size_t number = 0; number < steps / 4; number++) {
        step(number);
    }
    free_all();
    CHECK(calm_trim(0) > 0);
    CHECK_EQUAL(calm_governor.counts.purge_ns, 0);
}

/* For which memory is kept of which nothing is known, once an epoch has ended; and a few more. */
static unsigned break_even_epochs(void) {
    return (unsigned)(calm_governor.demand.break_even_s * 1e9 / (double)DEMAND_EPOCH_NS) + 3;
}

/* Free memory that the program does not touch is purged, though it is within the limit. */
static void test_unused_goes(void) {
    void *kept = obtain(8 * MIB);
    for (size_t i = 0; i < 8; i++) {
        blocks[i] = obtain(40 * KIB);
    }
    free_all();
    CHECK(stats_now().retained >= 300 * KIB);
    for (unsigned epoch = 0; epoch < 2 + break_even_epochs(); epoch++) {
        clock_advance(120 * CLOCK_MS);
        for (size_t i = 0; i < 40; i++) {
            calm_free(obtain(33 * KIB));
        }
    }
    struct calm_stats stats = stats_now();
    CHECK(stats.purges_epoch > 0);
    CHECK(stats.retained <= 16 * page_size + 40 * KIB);
    calm_free(kept);
}

/* ---- the helper ---- */

static void *use_heap(void *unused) {
    for (size_t i = 0; i < 40; i++) {
        calm_free(obtain(33 * KIB));
    }
    return unused;
}

static enum clock_sleep helper_sleep(void) {
    return clock_sleep_of(&calm_governor.helper_wakeup);
}

static bool helper_is_gone(void) {
    return thread_is_gone(&calm_governor.helper_thread);
}

/* An epoch passes, and the helper has done what it does then. */
static void pass_epoch(void) {
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL(helper_is_gone() || helper_sleep() == ASLEEP_FOR_A_WHILE);
}

/* Epochs until the helper ends. */
static unsigned epochs_to_end(void) {
    unsigned epochs = 0;
    while (!helper_is_gone()) {
        CHECK(epochs < 100);
        pass_epoch();
        epochs++;
    }
    return epochs;
}

static void come_from_other_thread(void *(*body)(void *)) {
    pthread_t other;
    CHECK(pthread_create(&other, NULL, body, NULL) == 0);
    CHECK(pthread_join(other, NULL) == 0);
}

static void *come_once(void *unused) {
    calm_free(obtain(64 * KIB));
    return unused;
}

/* Tidies up after a program that has threads and went idle, for as long as there is anything to tidy. */
static void test_helper(void) {
    set("test_placement", "off");
    void *kept = obtain(64 * MIB); /* beside which more may stay */
    use_heap(NULL);
    CHECK_EQUAL(calm_governor.helper, HELPER_NONE); /* of a program with one thread */
    for (size_t i = 0; i < 400; i++) {
        blocks[i] = obtain(256 * KIB);
    }
    free_all();
    come_from_other_thread(use_heap);
    clock_await_sleep(&calm_governor.helper_wakeup);
    CHECK_EQUAL(calm_governor.helper, HELPER_RUNS);
    CHECK_EQUAL(helper_sleep(), ASLEEP_FOR_A_WHILE);
    struct calm_stats stats = stats_now();
    CHECK(stats.retained > 5 * MIB);
    CHECK_EQUAL(stats.purges_epoch, 0);
    for (unsigned epoch = 0; epoch < 2 + break_even_epochs(); epoch++) {
        pass_epoch();
    }
    stats = stats_now();
    CHECK(stats.retained + stats.cached <= 5 * MIB);
    CHECK(stats.purges_epoch > 0 && stats.purges_epoch <= 10);

    CHECK(epochs_to_end() <= 10);
    CHECK_EQUAL(calm_governor.helper, HELPER_ALONE);
    stats = stats_now();
    CHECK_EQUAL(stats.retained + stats.cached, 0);
    CHECK_EQUAL(stats.in_use, 64 * MIB);

    /* The next to come to the heap starts it, on the same stack, unless that is the first thread, which may
     * be the last one, too. */
    const char *memory = calm_governor.helper_thread.memory;
    calm_free(obtain(64 * KIB));
    CHECK(helper_is_gone());
    come_from_other_thread(come_once);
    CHECK(stats_now().retained > 0);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);
    CHECK_EQUAL(calm_governor.helper, HELPER_RUNS);
    CHECK(epochs_to_end() <= 10);
    CHECK_EQUAL(stats_now().retained, 0);
    CHECK(calm_governor.helper_thread.memory == memory);

    /* While it is to be none, there is none. */
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);
    CHECK(helper_stop(&calm_governor, UINT64_MAX));
    CHECK(helper_is_gone());
    CHECK(helper_stop(&calm_governor, UINT64_MAX));
    helper_resume();
    come_from_other_thread(come_once);
    CHECK(helper_is_gone());
    helper_resume();
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);

    /* One that waits for who stops it is left, and ends as soon as it can; until then there is no other. */
    lock_acquire(&calm_governor.lock);
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL((atomic_load(&calm_governor.lock.state) & LOCK_WAITED) != 0);
    CHECK(!helper_stop(&calm_governor, 0));
    CHECK(!helper_is_gone());
    lock_release(&calm_governor.lock);
    WAIT_UNTIL(helper_is_gone());
    come_from_other_thread(come_once);
    CHECK(helper_is_gone());
    helper_resume();
    come_from_other_thread(come_once);
    WAIT_UNTIL(helper_sleep() == ASLEEP_FOR_A_WHILE);

    /* One that is not wanted any more is gone after its next epoch. */
    set("background", "off");
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL(helper_is_gone());
    CHECK_EQUAL(calm_governor.helper, HELPER_NONE);
    calm_free(kept);
}

/* ---- moved blocks ---- */

static size_t mappings_of_heap(void) {
    static char line[512];
    FILE *maps = fopen("/proc/self/maps", "re");
    CHECK(maps != NULL);
    const struct space *space = &calm_governor.heap.space;
    size_t found = 0;
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        uintptr_t last = strtoull(end + 1, NULL, 16);
        found += first < space->base + (space->quanta << SPACE_QUANTUM_SHIFT) && last > space->base;
    }
    fclose(maps);
    return found;
}

/* Vectors that grow step by step, and are gone at last: no mapping stays for any of them. */
static void test_grown_and_gone(void) {
    enum { VECTORS = 100 };
    set("huge_pages", "never");
    for (size_t bytes = 64 * KIB; bytes <= 4 * MIB; bytes += bytes / 2) {
        for (size_t i = 0; i < VECTORS; i++) {
            unsigned char *grown = calm_realloc(blocks[i], bytes);
            CHECK(grown != NULL);
            CHECK(blocks[i] == NULL || grown[0] == (unsigned char)(i + 1));
            grown[0] = (unsigned char)(i + 1);
            grown[bytes - 1] = 1;
            blocks[i] = grown;
        }
    }
    uint64_t moves = stats_now().large_moves;
    size_t grown = mappings_of_heap();
    free_all();
    calm_trim(0);
    size_t left = mappings_of_heap();
    printf("%llu moves of %d blocks: %zu mappings, %zu once they are gone\n", (unsigned long long)moves,
           VECTORS, grown, left);
    CHECK(moves > VECTORS);
    CHECK(left <= 8);
}

static size_t resident_pages(char *block, size_t bytes) {
    static unsigned char resident[4096];
    size_t pages = bytes / page_size;
    CHECK(pages <= sizeof resident);
    CHECK_EQUAL(mincore(block, bytes, resident), 0);
    size_t count = 0;
    for (size_t i = 0; i < pages; i++) {
        count += resident[i] & 1;
    }
    return count;
}

/* Whether the kernel was asked to fill huge pages around an address. */
static bool wants_huge_pages(const void *address) {
    char line[256];
    bool here = false;
    bool wants = false;
    FILE *maps = fopen("/proc/self/smaps", "r");
    CHECK(maps != NULL);
    while (fgets(line, sizeof line, maps) != NULL) {
        char *end;
        uintptr_t first = strtoull(line, &end, 16);
        if (*end == '-') {
            here = first <= (uintptr_t)address && (uintptr_t)address < strtoull(end + 1, NULL, 16);
        } else if (here && strncmp(line, "VmFlags:", 8) == 0) {
            wants = strstr(line, " hg") != NULL;
        }
    }
    fclose(maps);
    return wants;
}

static char *take_dense(size_t pages) {
    bool zero;
    lock_acquire(&calm_governor.lock);
    char *block = heap_take_large(&calm_governor.heap, pages, 1, RUN_FOR_HUGE_PAGES, false, &zero);
    lock_release(&calm_governor.lock);
    CHECK(block != NULL);
    memset(block, 1, pages * page_size);
    return block;
}

/* Where a part of a huge page was given back, the kernel does not fill it again, as it does in its own time
 * where huge pages are wanted; and where all of it was, it is a huge page again at its next use. */
/* What is usable at the end of the heap, and was used by no block for a while, is reserved again: trimmed,
 * and by a governor that has nothing to do. */
static void test_usable_memory_is_reserved_again(void) {
    const struct segment *segment = &calm_governor.heap.space.segment[0];
    size_t before = segment->region.committed;
    for (int trims = 0; trims < 2; trims++) {
        calm_free(obtain(256 * MIB));
        CHECK(segment->region.committed >= before + 200 * MIB);
        if (trims) {
            calm_trim(0);
        }
        for (int epoch = 0; epoch < 1000; epoch++) {
            clock_advance(DEMAND_EPOCH_NS);
            governor_tick(&calm_governor, false);
        }
        CHECK(segment->region.committed < before + 32 * MIB);
    }
    memset(obtain(256 * MIB), 1, 256 * MIB);
}

/* Memory that something else made resident is found in time, counted, and purged again. */
static void test_clean_memory_is_examined(void) {
    enum { BYTES = 64 * MIB };
    char *block = obtain(BYTES);
    char *middle = (char *)((uintptr_t)(block + BYTES / 2) & -page_size);
    char *behind = obtain(MIB); /* or the memory would be reserved again */
    CHECK(behind > block);
    calm_free(block);
    calm_trim(0);
    CHECK(stats_now().retained < 4 * MIB);
    for (size_t at = 0; at < 8 * MIB; at += page_size) {
        middle[at] = 1; /* as khugepaged might; no block is there */
    }
    size_t resident = SIZE_MAX;
    for (int epoch = 0; epoch < 4096 && resident > 0; epoch++) {
        clock_advance(DEMAND_EPOCH_NS);
        governor_tick(&calm_governor, false);
        resident = residency_of_tail(middle, 8 * MIB, SIZE_MAX, scratch).resident_bytes;
    }
    CHECK(filters_now() != FILTERS_NONE || resident == 0);
    calm_free(behind);
}

static void test_parts_of_huge_pages(void) {
    size_t region = calm_governor.heap.runs.region_pages;
    if (region == 0) {
        printf("the kernel gives no huge pages\n");
        return;
    }
    set("memory_per_cpu", "1600"); /* so that a trim alone gives back */
    char *block = take_dense(3 * region);
    char *middle = block + region * page_size;
    CHECK(wants_huge_pages(block) && wants_huge_pages(middle));
    governor_put_large(&calm_governor, block);
    CHECK(take_dense(region / 2) == block);
    CHECK(purger_enter(&calm_governor));
    purge_down(&calm_governor, 0, 0, REASON_ASKED);
    purger_leave(&calm_governor);
    CHECK_EQUAL(resident_pages(block, 3 * region * page_size), region / 2);
    CHECK(!wants_huge_pages(block) && !wants_huge_pages(middle - 1) && wants_huge_pages(middle));
    governor_put_large(&calm_governor, block);
    calm_trim(0);
    CHECK(take_dense(2 * region) == block);
    CHECK(wants_huge_pages(block) && wants_huge_pages(middle - 1));
}

static char *zeroed(size_t bytes) {
    char *block = calm_calloc(bytes, 1);
    CHECK(block != NULL && (uintptr_t)block % page_size == 0);
    return block;
}

/* Of so many new blocks: those that begin in pages that are not resident. */
static size_t untouched_blocks(size_t count, size_t bytes) {
    size_t untouched = 0;
    for (size_t i = 0; i < count; i++) {
        char *block = calm_malloc(bytes);
        CHECK(block != NULL);
        char *page = (char *)((uintptr_t)block & ~(page_size - 1));
        untouched += resident_pages(page, page_size) == 0;
    }
    return untouched;
}

/*
 * A program that first reads a new block finds its page written already, so that its own write copies no zero
 * page; but not while it uses little, since then the pages of a magazine that it never uses would count.
 */
static void test_new_pages_touched(void) {
    CHECK(cpu_pin((unsigned)sched_getcpu())); /* another CPU's cache may have a block from before */
#ifndef CALM_ASSERTIONS                       /* with which new blocks are filled */
    CHECK(untouched_blocks(100, 3000) > 0);
#endif
    obtain(20 * MIB);
    untouched_blocks(100, 3000); /* the rest of the caches' blocks */
    CHECK_EQUAL(untouched_blocks(1000, 3000), 0);
    CHECK_EQUAL(untouched_blocks(1000, 5000), 0);
}

/* Of large blocks of calloc hardly anything is resident before it is touched, however much free memory is. */
static void test_zeros_are_not_resident(void) {
    set("test_placement", "off"); /* so that blocks are the pages that they lie on */
    for (size_t i = 0; i < 100; i++) {
        blocks[i] = obtain(300 * KIB);
    }
    for (size_t i = 0; i < 100; i++) {
        calm_free(blocks[i]);
        blocks[i] = NULL;
    }
    CHECK(stats_now().retained > 0);
    size_t resident = 0;
    for (size_t i = 0; i < 300; i++) {
        blocks[i] = zeroed(MIB);
        resident += resident_pages(blocks[i], MIB);
        CHECK_EQUAL(((char *)blocks[i])[MIB / 2], 0);
    }
    CHECK(resident * page_size <= 4 * MIB);
    free_all();
}

/* For medium blocks. */
static size_t depot_bounds(size_t *most) {
    size_t sum = 0;
    *most = 0;
    for (unsigned i = 0; i < calm_governor.depot_count; i++) {
        sum += atomic_load(&calm_governor.depots[i].medium.bound);
        *most += calm_governor.depots[i].medium.max_bound;
    }
    return sum;
}

/* What is freed all at once, and taken again, stays in the depot: even all that there is. */
static void test_depot_grows(void) {
    enum { BLOCKS = 300, BYTES = 4096 };
    size_t most;
    size_t least = depot_bounds(&most);
    uint64_t locks[2];
    for (int half = 0; half < 2; half++) {
        uint64_t before = stats_now().heap_locks;
        for (int turn = 0; turn < 200; turn++) {
            for (size_t i = 0; i < BLOCKS; i++) {
                blocks[i] = obtain(BYTES);
            }
            for (size_t i = 0; i < BLOCKS; i++) {
                calm_free(blocks[i]);
                blocks[i] = NULL;
            }
        }
        locks[half] = stats_now().heap_locks - before;
        struct calm_stats stats = stats_now();
        CHECK(stats.cached <= stats.cached_limit);
    }
    size_t grown = depot_bounds(&most);
    printf("depot: %zu KiB, %zu once grown; %llu trips to the heap, then %llu\n", least / KIB, grown / KIB,
           (unsigned long long)locks[0], (unsigned long long)locks[1]);
    CHECK(grown > least && grown <= most);
    CHECK(locks[1] < locks[0] / 2);
}

/* Where CPUs have several depots, what one of them holds is taken before the heap is asked. */
static void test_depots_of_other_cpus(void) {
    enum { BLOCKS = 64, BYTES = 4096 };
    static struct governor governor;
    CHECK(governor_init(&governor, &calm_classes, calm_governor.caches, (size_t)1 << 30, true, NULL));
    CHECK(governor.depot_count >= 1 && governor.depot_count <= MAX_DEPOTS);
    for (unsigned i = governor.depot_count; i < 3; i++) { /* as if there were 12 CPUs */
        CHECK(depot_init(&governor.depots[i], &calm_classes, DEPOT_BIN_BLOCKS, MIB, MIB, MIB));
    }
    governor.depot_count = governor.depots_per_node = 3;
    uint32_t class = size_class_of(&calm_classes, BYTES);
    void *taken[BLOCKS];
    CHECK_EQUAL(governor_take_blocks(&governor, class, taken, BLOCKS, false), BLOCKS);
    size_t each = calm_classes.of[class].batch;
    for (unsigned i = 0; i < 3; i++) {
        CHECK(depot_put(&governor.depots[i], class, taken + i * each, each));
    }
    uint64_t locks = governor.heap_locks;
    bool seen[BLOCKS] = {false};
    for (unsigned i = 0; i < 3; i++) {
        void *again[BLOCKS];
        CHECK_EQUAL(governor_take_blocks(&governor, class, again, each, false), each);
        for (size_t k = 0; k < each; k++) {
            size_t at = 0;
            while (at < 3 * each && taken[at] != again[k]) {
                at++;
            }
            CHECK(at < 3 * each && !seen[at]);
            seen[at] = true;
        }
    }
    CHECK_EQUAL(governor.heap_locks, locks);
    CHECK_EQUAL(governor_take_blocks(&governor, class, taken, 1, false), 1);
    CHECK_EQUAL(governor.heap_locks, locks + 1);
}

/* ---- what is worth keeping ---- */

enum { WAVE = 400, WAVE_BYTES = 256 * 1024 };

static void build(void) {
    for (size_t i = 0; i < WAVE; i++) {
        blocks[i] = obtain(WAVE_BYTES);
    }
}

/* So much CPU time is used, and the helper looks at the clock. */
static void pass_epochs(size_t count, uint64_t cpu_ns) {
    for (size_t i = 0; i < count; i++) {
        clock_use_cpu(cpu_ns, 0);
        pass_epoch();
    }
}

/* A program of one thread that keeps much has a helper, which gives it back, and is gone then; one that keeps
 * little has none. */
static void test_lone_thread(void) {
    for (int round = 0; round < 3; round++) {
        calm_free(obtain(3 * MIB));
        CHECK(helper_is_gone());
        build();
        CHECK(helper_is_gone());
        free_all();
        CHECK_EQUAL(stats_now().purges_limit, 0);
        CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
        clock_await_sleep(&calm_governor.helper_wakeup);
        CHECK_EQUAL(calm_governor.helper, HELPER_RUNS);
        pass_epochs(1, 0);
        pass_epochs(break_even_epochs(), 0);
        CHECK_EQUAL(stats_now().retained, 0);
        CHECK(epochs_to_end() <= 10);
        CHECK_EQUAL(calm_governor.helper, HELPER_ALONE);
    }
}

/* No helper would give it back: then it does not stay. */
static void test_lone_thread_without_helper(void) {
    build();
    free_all();
    CHECK(helper_is_gone());
    CHECK(stats_now().retained <= RETENTION_FOREGROUND_BYTES);
}

/* The test's clock knows nothing of it. */
static void fix_fault_cost(void) {
    atomic_store(&calm_governor.fault_ns, 1000.0);
    calm_governor.fault_measures = UINT_MAX;
}

/* What comes in waves stays between them, once it is known how far apart they are; and goes when no more
 * come. */
static void test_waves(void) {
    set("huge_pages", "never"); /* once they are earned, what lies elsewhere goes */
    fix_fault_cost();
    for (size_t gap = 1; gap <= 32; gap *= 4) {
        uint64_t known = 0;
        for (int wave = 0; wave < 12; wave++) {
            build();
            pass_epochs(1, DEMAND_EPOCH_NS / 10);
            free_all();
            clock_await_sleep(&calm_governor.helper_wakeup);
            pass_epochs(gap, DEMAND_EPOCH_NS / 10);
            known = wave == 2 ? stats_now().purged : known;
        }
        CHECK_EQUAL(stats_now().purged, known);
        CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
        size_t epochs = 0;
        for (; stats_now().retained > 0; epochs++) {
            pass_epochs(1, 0);
            CHECK(epochs < 128);
        }
        printf("waves %zu epochs apart: gone after %zu\n", gap, epochs);
        CHECK(epochs > gap);
        memset(&calm_governor.demand, 0, sizeof calm_governor.demand);
    }
}

/* Small blocks of which some stay, and large ones, in turn: neither fits where the other was, so that what is
 * in use does not show what is wanted again. What giving back costs does. */
static void test_waves_of_two_kinds(void) {
    enum { SMALL = 480, SMALLS = 100000 };
    fix_fault_cost();
    static void *small[SMALLS];
    uint64_t purged = 0;
    for (int wave = 0; wave < 30; wave++) {
        for (size_t i = 0; i < SMALLS; i++) {
            small[i] = small[i] == NULL ? obtain(SMALL) : small[i];
        }
        for (size_t i = 0; i < SMALLS; i++) {
            if (i % 64 != 0) {
                calm_free(small[i]);
                small[i] = NULL;
            }
        }
        build();
        free_all();
        clock_await_sleep(&calm_governor.helper_wakeup);
        pass_epochs(1, DEMAND_EPOCH_NS);
        purged = wave == 9 ? stats_now().purged : purged;
    }
    /* In 20 waves less than 2 would have been given back and taken again. */
    CHECK(stats_now().purged - purged < (uint64_t)4 * SMALLS * SMALL);
    for (size_t i = 0; i < SMALLS; i++) {
        calm_free(small[i]);
    }
}

/* Of the room that memory has, a third at most is for later. */
static void test_room(void) {
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    calm_governor.max_footprint = 30 * MIB;
    set("memory_per_cpu", "7"); /* looks anew */
    struct calm_stats stats = stats_now();
    CHECK_EQUAL(stats.retained_limit, 10 * MIB);
    CHECK(stats.retained <= stats.retained_limit);
    calm_governor.max_footprint = 0;
    set("memory_per_cpu", "8");
    CHECK(stats_now().retained <= MIN_LIMIT_PAGES * page_size);
}

static void test_scarce_memory_costs_more(void) {
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    pass_epoch();
    double once = memory_per_cpu_bytes(&calm_governor);
    CHECK(once >= 2.0 * 1024 * MIB && once <= 16.0 * 1024 * MIB);
    note_offer(&calm_governor, (size_t)12 << 30, 1); /* of the time of one CPU */
    CHECK(memory_per_cpu_bytes(&calm_governor) == 12.0 * 1024 * MIB);
    note_offer(&calm_governor, (size_t)120 << 30, 1);
    CHECK(memory_per_cpu_bytes(&calm_governor) == 16.0 * 1024 * MIB);
    unsigned cpus = cpu_set_count(&calm_governor.cpus);
    note_offer(&calm_governor, (size_t)cpus * 8 << 30, 1e9);
    double offered = 8;
    CHECK(memory_per_cpu_bytes(&calm_governor) == offered * 1024 * MIB);
    calm_governor.scarcity_factor = 0.25;
    CHECK(memory_per_cpu_bytes(&calm_governor) == offered * 256 * MIB);
    set("memory_per_cpu", "12");
    CHECK(memory_per_cpu_bytes(&calm_governor) == 3.0 * 1024 * MIB);
    obtain(64 * MIB);
    set("test_policy", "paper");
    uint64_t limit = stats_now().retained_limit;
    lock_acquire(&calm_governor.purge_lock);
    calm_governor.family_share = 0.5;
    CHECK(memory_per_cpu_bytes(&calm_governor) == 1.5 * 1024 * MIB);
    lock_release(&calm_governor.purge_lock);
    governor_refresh(&calm_governor);
    CHECK(stats_now().retained_limit <= limit / 2 + page_size);
}

/* Below half of what there is, in proportion. */
static void test_scarcity_is_read(void) {
    static const size_t rooms[] = {(size_t)8 << 30, (size_t)4 << 30, (size_t)1 << 30, 0};
    static const double factors[] = {1, 1, 0.25, 0};
    atomic_store(&calm_governor.settings.watch_cgroup, 1);
    for (size_t i = 0; i < 4; i++) {
        room_said = rooms[i];
        clock_advance(20 * DEMAND_EPOCH_NS);
        governor_read_max_footprint(&calm_governor, true);
        CHECK(calm_governor.scarcity_factor == factors[i]);
    }
}

/* Processes that keep memory at the same time share what one may keep. */
static void test_family(void) {
    CHECK_EQUAL(calm_governor.family.member, 0); /* not its parent's */
    struct family family = {0};
    CHECK(family_share(&family, 100 * MIB) == 1);
    family_before_fork(&family);
    CHECK(family_share(&family, 100 * MIB) == 1);
    for (int i = 0; i < 3; i++) {
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            family_start_child(&family);
            family_share(&family, 100 * MIB);
            _exit(0);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    CHECK(family_share(&family, 100 * MIB) == 0.25);
    CHECK(family_share(&family, 300 * MIB) == 0.5);
    CHECK(family_share(&family, 0) > 0.33 && family_share(&family, 0) < 0.34);
    clock_advance(20 * DEMAND_EPOCH_NS); /* they keep nothing any more, or ended */
    CHECK(family_share(&family, 100 * MIB) == 1);
}

/* A copy of the process that the C library did not make takes the helper for one that runs: there is none,
 * and the threads that come to the heap look at the clock. */
static void test_overdue(void) {
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    pid_t child = (pid_t)os_syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0, 0);
    CHECK(child >= 0);
    if (child == 0) {
        for (int i = 0; i < 100; i++) {
            clock_advance(2 * DEMAND_EPOCH_NS);
            for (int j = 0; j < 20; j++) {
                calm_free(obtain(64 * KIB));
            }
        }
        CHECK(stats_now().purges_epoch > 0);
        CHECK(stats_now().retained < MIB);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* What refused a thread, a limit on their number say, may not last. */
static void test_refused_helper(void) {
    enum { VISITS = 65536 };
    atomic_store(&calm_governor.helper, HELPER_REFUSED);
    for (int visit = 0; visit < VISITS / 4; visit++) {
        calm_free(obtain(64 * KIB));
    }
    CHECK_EQUAL(calm_governor.helper, HELPER_REFUSED);
    for (int visit = 0; visit < VISITS && calm_governor.helper == HELPER_REFUSED; visit++) {
        calm_free(obtain(64 * KIB));
    }
    CHECK_EQUAL(calm_governor.helper, HELPER_RUNS);
}

/* A thread that read the clock, and was preempted until another had ended the epoch, ends none of -1 ns. */
static void test_epoch_of_the_future(void) {
    obtain(3 * MIB);
    size_t epochs = calm_governor.demand.epochs;
    uint64_t start = clock_coarse_ns() + DEMAND_EPOCH_NS;
    atomic_store(&calm_governor.epoch_start_ns, start);
    CHECK(!governor_tick(&calm_governor, false));
    CHECK_EQUAL(calm_governor.demand.epochs, epochs);
    CHECK_EQUAL(calm_governor.epoch_start_ns, start);
}

/* As if a fork had just purged. */
static void forbid_fork_purges(void) {
    lock_acquire(&calm_governor.purge_lock);
    calm_governor.fork_purge_epoch = calm_governor.demand.epochs + 1;
    calm_governor.demand.break_even_s = 1000;
    lock_release(&calm_governor.purge_lock);
}

/* What is kept for later is given back before a fork, unless another fork just did. */
static void test_fork_gives_back(void) {
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(stats_now().retained <= WAVE * WAVE_BYTES / 2);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(stats_now().retained <= WAVE * WAVE_BYTES / 2);
}

/* What a parent keeps for itself is given back in its child, which starts no helper to keep it. */
static void test_child_keeps_little(void) {
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
    forbid_fork_purges();
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        calm_free(obtain(300 * KIB));
        CHECK(helper_is_gone());
        CHECK(stats_now().retained <= 2 * MIB);
        /* Until it has waves of its own. */
        for (int wave = 0; wave < 3; wave++) {
            build();
            free_all();
        }
        clock_await_sleep(&calm_governor.helper_wakeup);
        CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
}

/* A helper drains caches: while there is one, a lone thread takes the caches' locks. */
static void test_lone_thread_beside_helper(void) {
    calm_caches.alone_without_helper = thread_alone;
    cpu_caches_set_helper(&calm_caches, false);
    CHECK(!thread_is_alone() || cpu_cache_is_alone(&calm_caches));
    build();
    free_all();
    clock_await_sleep(&calm_governor.helper_wakeup);
    CHECK(!cpu_cache_is_alone(&calm_caches));
    epochs_to_end();
    CHECK(!thread_is_alone() || cpu_cache_is_alone(&calm_caches));
}

/* One that has no table of open files of its own opens none in the program's. */
static void test_helper_opens_no_files(void) {
    atomic_store(&calm_governor.settings.watch_cgroup, 1);
    atomic_store(&calm_governor.helper, HELPER_RUNS);
    calm_governor.max_footprint_read_ns = 0;
    calm_governor.max_footprint = 123 * MIB;
    clock_advance(20 * DEMAND_EPOCH_NS);
    governor_tick(&calm_governor, false);
    CHECK_EQUAL(calm_governor.max_footprint_read_ns, 0);
    CHECK_EQUAL(calm_governor.max_footprint, 123 * MIB); /* what is known stays known */
    atomic_store(&calm_governor.helper, HELPER_NONE);
    clock_advance(20 * DEMAND_EPOCH_NS);
    governor_tick(&calm_governor, false);
    CHECK(!thread_is_alone() || calm_governor.max_footprint_read_ns != 0);
    CHECK_EQUAL(room_reads, thread_is_alone() ? 1 : 0);
    CHECK_EQUAL(room_reads_locked, 0); /* a file may be slow to read */
}

/* In a container, whose seccomp filter the program inherits, it is read at the start alone, and stays known.
 */
static void test_room_read_at_start(void) {
    atomic_store(&calm_governor.settings.watch_cgroup, 1);
    filters_set(FILTERS_INHERITED);
    governor_read_max_footprint(&calm_governor, true);
    CHECK_EQUAL(room_reads, 1);
    calm_governor.max_footprint = 30 * MIB;
    build();
    free_all();
    for (int second = 0; second < 3; second++) {
        clock_await_sleep(&calm_governor.helper_wakeup);
        clock_advance(10 * DEMAND_EPOCH_NS);
    }
    clock_await_sleep(&calm_governor.helper_wakeup);
    CHECK_EQUAL(room_reads, 1);
    CHECK(stats_now().retained_limit <= 10 * MIB);
}

/* More forks within an epoch give nothing back: what the first one's cost is known at its end. */
static void test_fork_gives_back_once_an_epoch(void) {
    for (int fork_number = 0; fork_number < 2; fork_number++) {
        build();
        free_all();
        clock_await_sleep(&calm_governor.helper_wakeup);
        CHECK(stats_now().retained > (WAVE - 1) * WAVE_BYTES);
        governor_shrink_for_fork(&calm_governor);
        CHECK((stats_now().retained > WAVE * WAVE_BYTES / 2) == (fork_number == 1));
    }
}

static _Atomic(int) purger_stops;

static void *stop_as_purger(void *unused) {
    lock_acquire(&calm_governor.purge_lock);
    atomic_store(&purger_stops, 1);
    WAIT_UNTIL(atomic_load(&purger_stops) == 2);
    lock_release(&calm_governor.purge_lock);
    return unused;
}

/* Where the purger may be stopped, no thread waits for it; what they leave goes once it goes on. */
static void test_stopped_purger(void) {
    calm_governor.purger_may_stop = true;
    build();
    pthread_t purger;
    CHECK(pthread_create(&purger, NULL, stop_as_purger, NULL) == 0);
    WAIT_UNTIL(atomic_load(&purger_stops) == 1);
    free_all();
    CHECK(stats_now().retained > stats_now().retained_limit);
    CHECK_EQUAL(calm_trim(0), 0);
    atomic_store(&purger_stops, 2);
    CHECK(pthread_join(purger, NULL) == 0);
    clock_advance(DEMAND_EPOCH_NS);
    governor_tick(&calm_governor, false);
    CHECK(stats_now().retained <= stats_now().retained_limit);
}

/* ---- an owner ---- */

/* This thread, for which the locks are held by nobody who would release them. What it keeps ready are blocks
 * of one class. */
enum { READY = 100, READY_BYTES = 256, LATE = 400 };

static struct {
    unsigned between;
    unsigned flushes;
    uint64_t heap_locks; /* when exclusive mode began */
    bool serving;
    size_t late; /* blocks that are freed between two slices */
    void *late_blocks[LATE];
    size_t ready;
    void *ready_blocks[READY];
} owner_state;

/* A client's frees, while the heap is purged: they do not purge on their own. */
static void free_late(void) {
    CHECK(!owner_state.serving);
    owner_state.serving = true;
    uint64_t purged = calm_governor.counts.purged_pages;
    uint64_t ranges = calm_governor.counts.ranges;
    unsigned between = owner_state.between;
    while (owner_state.late > 0) {
        governor_put_large(&calm_governor, owner_state.late_blocks[--owner_state.late]);
    }
    CHECK_EQUAL(calm_governor.counts.purged_pages, purged);
    CHECK_EQUAL(calm_governor.counts.ranges, ranges);
    CHECK_EQUAL(owner_state.between, between);
    owner_state.serving = false;
}

static void between(void *context) {
    CHECK(context == &owner_state);
    owner_state.between++;
    free_late();
}

static size_t cached(const void *context, size_t *bytes) {
    CHECK(context == &owner_state);
    *bytes = owner_state.ready * READY_BYTES;
    return owner_state.ready;
}

static uint32_t ready_class(void) {
    return size_class_of(calm_governor.heap.classes, READY_BYTES);
}

static void flush(void *context) {
    CHECK(context == &owner_state);
    owner_state.flushes++;
    size_t count = owner_state.ready;
    owner_state.ready = 0;
    if (count > 0) {
        governor_put_blocks(&calm_governor, ready_class(), owner_state.ready_blocks, count);
    }
}

static const struct heap_ops owner = {&owner_state, between, cached, flush};

static void own(void) {
    calm_governor.ops = &owner;
    governor_set_mode(&calm_governor, MODE_EXCLUSIVE);
    owner_state.heap_locks = calm_governor.heap_locks;
    for (unsigned i = 0; i < calm_governor.depot_count; i++) {
        for (uint32_t class = 1; class < calm_governor.heap.classes->count; ++class) {
            lock_lose(&calm_governor.depots[i].bins[class].lock);
        }
    }
}

static void disown(void) {
    for (unsigned i = 0; i < calm_governor.depot_count; i++) {
        for (uint32_t class = 1; class < calm_governor.heap.classes->count; ++class) {
            lock_find(&calm_governor.depots[i].bins[class].lock);
        }
    }
    CHECK_EQUAL(calm_governor.heap_locks, owner_state.heap_locks);
    governor_set_mode(&calm_governor, SHARED_FOR_GOOD);
}

static void test_owner_takes_no_lock(void) {
    calm_free(obtain(100 * KIB));
    uint64_t locks = stats_now().heap_locks;
    own();
    for (size_t number = 0; number < steps / 3; number++) {
        step(number);
        if (number % 1000 == 0) {
            governor_tick(&calm_governor, false);
        }
        struct calm_stats stats = stats_now();
        check_limit(&stats, 1, TENDED, 1);
    }
    free_all();
    struct calm_stats stats = stats_now();
    check_limit(&stats, 1, TENDED, 1);
    CHECK(stats.purges_limit + stats.purges_epoch > 0);
    CHECK(owner_state.between > 0);
    calm_trim(0);
    set("memory_per_cpu", "1");
    stats = stats_now();
    CHECK_EQUAL(stats.in_use + stats.retained + stats.cached, 0);
    CHECK_EQUAL(stats.heap_locks, locks);
    heap_walk(&calm_governor.heap, NULL, 0);
    disown();
    run_steps();
    stats = stats_now();
    check_limit(&stats, 0, TENDED, 0.5);
    CHECK(stats.heap_locks > locks);
    check_heap();
}

/* A depot that has the rest of a magazine is no reason to hand out less than there is. */
static void test_owner_has_whole_magazines(void) {
    own();
    uint32_t class = ready_class();
    void *whole[MAX_MAGAZINE_BLOCKS];
    void *rest[1];
    size_t batch = calm_governor.heap.classes->of[class].batch;
    CHECK(batch > 1);
    CHECK_EQUAL(governor_take_blocks(&calm_governor, class, rest, 1, false), 1);
    governor_put_blocks(&calm_governor, class, rest, 1);
    for (int again = 0; again < 3; again++) {
        CHECK_EQUAL(governor_take_blocks(&calm_governor, class, whole, batch, false), batch);
        governor_put_blocks(&calm_governor, class, whole, 1);
        CHECK_EQUAL(governor_take_blocks(&calm_governor, class, rest, 1, false), 1);
        governor_put_blocks(&calm_governor, class, whole + 1, batch - 1);
        governor_put_blocks(&calm_governor, class, rest, 1);
    }
    disown();
    heap_walk(&calm_governor.heap, NULL, 0);
}

/* What will be freed between two slices of a purge: much more than may stay. */
static void prepare_late(void) {
    for (size_t i = 0; i < LATE; i++) {
        owner_state.late_blocks[i] = obtain(64 * KIB);
    }
    owner_state.late = LATE;
    owner_state.between = 0;
}

static void expect_within(void) {
    struct calm_stats stats = stats_now();
    CHECK(owner_state.between > 0);
    CHECK_EQUAL(owner_state.late, 0);
    CHECK(stats.retained <= stats.retained_limit);
}

/* However a purge came to be: what is freed in its midst is within the bound when it is over. */
static void test_frees_between_slices(void) {
    set("test_policy", "paper");
    own();
    prepare_late();
    for (size_t i = 0; i < 400; i++) {
        blocks[i] = obtain(256 * KIB);
    }
    free_all(); /* over the bound */
    expect_within();

    prepare_late();
    calm_free(obtain(512 * KIB));
    CHECK_EQUAL(owner_state.between, 0);
    calm_trim(0);
    expect_within();

    prepare_late();
    calm_free(obtain(512 * KIB));
    CHECK_EQUAL(owner_state.between, 0);
    set("memory_per_cpu", "0"); /* over a new bound */
    expect_within();
    set("memory_per_cpu", "8");
    disown();
}

/* The same where time has passed, and nobody comes to the heap after it. */
static void test_frees_between_slices_of_a_tick(void) {
    set("huge_pages", "never"); /* parts of them stay */
    own();
    for (int round = 0; round < 3; round++) {
        prepare_late();
        calm_free(obtain(256 * KIB));
        CHECK_EQUAL(owner_state.between, 0);
        /* Free memory that was not used for a time is purged, or some of it. */
        while (owner_state.between == 0) {
            clock_advance(60 * CLOCK_MS);
            governor_tick(&calm_governor, false);
        }
        expect_within();
        calm_trim(0);
    }
    CHECK(stats_now().purges_epoch > 0);
    disown();
}

static void expect_no_report(const struct misuse_record *misuse) {
    fprintf(stderr, "reported by the owner: %d, %p\n", (int)misuse->kind, misuse->pointer);
    _Exit(1);
}

/* Misuse waits for a client, which reports it: the last of it, in order, once. */
static void test_owner_keeps_misuse(void) {
    calm_governor.misused = expect_no_report;
    void *twice[2 * MISUSE_RECORDS];
    struct misuse_record notes[MISUSE_RECORDS];
    own();
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), 0);
    for (size_t i = 0; i < 2 * MISUSE_RECORDS; i++) {
        twice[i] = obtain((64 + i) * KIB);
    }
    for (size_t i = 0; i < 2 * MISUSE_RECORDS; i++) {
        governor_put_large(&calm_governor, twice[i]);
    }
    CHECK(!atomic_load(&calm_governor.misuse_waits));
    for (size_t i = 0; i < 3; i++) {
        governor_put_large(&calm_governor, twice[i]);
        CHECK(atomic_load(&calm_governor.misuse_waits));
    }
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), 3);
    for (size_t i = 0; i < 3; i++) {
        CHECK(notes[i].pointer == twice[i]);
    }
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), 0);
    for (size_t i = 0; i < 2 * MISUSE_RECORDS; i++) {
        governor_put_large(&calm_governor, twice[i]);
    }
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), MISUSE_RECORDS);
    for (size_t i = 0; i < MISUSE_RECORDS; i++) {
        CHECK(notes[i].pointer == twice[MISUSE_RECORDS + i]);
    }
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), 0);
    void *block;
    CHECK_EQUAL(governor_take_blocks(&calm_governor, ready_class(), &block, 1, false), 1);
    heap_put_blocks(&calm_governor.heap, &block, 1);
    heap_put_blocks(&calm_governor.heap, &block, 1);
    CHECK_EQUAL(governor_take_misuse(&calm_governor, notes), 1);
    CHECK_EQUAL(notes[0].kind, MISUSE_DOUBLE_FREE);
    CHECK(notes[0].pointer == block);
    disown();
    heap_walk(&calm_governor.heap, NULL, 0);
}

static void *stop_at_cache(void *cache) {
    struct lock *lock = cache;
    lock_acquire(lock);
    atomic_store(&purger_stops, 1);
    WAIT_UNTIL(atomic_load(&purger_stops) == 2);
    lock_release(lock);
    return NULL;
}

/* A debugger may have stopped the owner while it emptied a CPU's cache: a fork does not wait for that. */
static void test_fork_beside_stopped_owner(void) {
    calm_free(obtain(64));
    struct cpu_cache_state *state = NULL;
    for (unsigned i = 0; i < calm_caches.count && calm_caches.states != NULL; i++) {
        state = atomic_load(&calm_caches.states[i].open) ? &calm_caches.states[i] : state;
    }
    CHECK(state != NULL);
    own();
    CHECK(purger_try(&calm_governor));
    pthread_t owner_thread;
    CHECK(pthread_create(&owner_thread, NULL, stop_at_cache, &state->lock) == 0);
    WAIT_UNTIL(atomic_load(&purger_stops) == 1);
    governor_before_fork(&calm_governor);
    governor_after_fork(&calm_governor, false);
    atomic_store(&purger_stops, 2);
    CHECK(pthread_join(owner_thread, NULL) == 0);
    purger_leave(&calm_governor);
    disown();
}

enum { FRESH = 640, FRESH_BYTES = 128 * 1024 };

/* How many of the latter half were resident before anybody touched them. */
static size_t take_fresh(bool touches) {
    size_t ready = 0;
    size_t pages = FRESH_BYTES / page_size;
    set("huge_pages", "never");
    own();
    for (size_t i = 0; i < FRESH; i++) {
        bool zero;
        char *block = governor_take_large(&calm_governor, pages, 1, true, true, &zero);
        CHECK(block != NULL && zero);
        bool is_ready = !heap_large_span(&calm_governor.heap, block)->fresh;
        CHECK_EQUAL(resident_pages(block, FRESH_BYTES), is_ready ? pages : 0);
        ready += i >= FRESH / 2 && is_ready;
        for (size_t at = 0; touches && at < FRESH_BYTES; at += page_size) {
            CHECK_EQUAL(block[at], 0);
            block[at] = 1;
        }
    }
    disown();
    return ready;
}

/* A program that touches all its large blocks has the next ones resident, but for one in 32, which is to show
 * whether it still does; one that does not has none. */
static void test_owner_makes_large_blocks_ready(void) {
    CHECK_EQUAL(take_fresh(true), FRESH / 2 / 32 * 31);
}

static void test_owner_makes_nothing_ready_in_vain(void) {
    CHECK_EQUAL(take_fresh(false), 0);
}

/* What an owner keeps ready counts, stays while time passes, and goes with a trim. */
static void test_exclusive_thread_flushes_prefilled(void) {
    own();
    CHECK_EQUAL(
        governor_take_blocks(&calm_governor, ready_class(), owner_state.ready_blocks, READY / 2, false),
        READY / 2);
    CHECK_EQUAL(governor_take_blocks(&calm_governor, ready_class(), owner_state.ready_blocks + READY / 2,
                                     READY / 2, false),
                READY / 2);
    owner_state.ready = READY;
    void *kept = obtain(64 * MIB); /* beside which it is little */
    size_t bytes;
    CHECK(governor_cached(&calm_governor, &bytes) >= READY);
    CHECK(bytes >= READY * READY_BYTES);
    CHECK(stats_now().cached >= READY * READY_BYTES);
    clock_advance(120 * CLOCK_MS);
    CHECK(!governor_tick(&calm_governor, false));
    CHECK_EQUAL(owner_state.flushes, 0);
    calm_trim(0);
    CHECK(owner_state.flushes > 0);
    CHECK_EQUAL(owner_state.ready, 0);
    struct calm_stats stats = stats_now();
    CHECK_EQUAL(stats.cached, 0);
    CHECK_EQUAL(stats.retained, 0);
    CHECK_EQUAL(stats.in_use, 64 * MIB + page_size); /* it may begin within a page */
    calm_free(kept);
    disown();
}

/* An owner that has nothing to tidy is told so; not while it keeps anything ready. */
static void test_owner_is_idle(void) {
    own();
    CHECK_EQUAL(governor_take_blocks(&calm_governor, ready_class(), owner_state.ready_blocks, 1, false), 1);
    owner_state.ready = 1;
    calm_trim(SIZE_MAX);
    CHECK_EQUAL(owner_state.ready, 0);
    CHECK_EQUAL(governor_take_blocks(&calm_governor, ready_class(), owner_state.ready_blocks, 1, false), 1);
    owner_state.ready = 1;
    for (int epoch = 0; epoch < 3; epoch++) {
        clock_advance(120 * CLOCK_MS);
        CHECK(!governor_tick(&calm_governor, false));
    }
    flush(&owner_state);
    bool idle = false;
    for (int epoch = 0; epoch < 20 && !idle; epoch++) {
        clock_advance(120 * CLOCK_MS);
        idle = governor_tick(&calm_governor, false);
    }
    CHECK(idle);
    CHECK_EQUAL(stats_now().retained + stats_now().cached, 0);
    disown();
}

static void check_counters(void) {
    static const char *const only_here[] = {"reserved", "metadata", "cached_limit", "offload_hits",
                                            "offload_misses"};
    const struct counter_table *table = counter_table_of("calmalloc");
    struct calm_stats stats = stats_now();
    size_t skipped = 0;
#define COUNTER(name, ...)                                       \
    if (skipped < 5 && strcmp(#name, only_here[skipped]) == 0) { \
        skipped++;                                               \
    } else {                                                     \
        CHECK_EQUAL(counter_now(table, #name), stats.name);      \
    }
#include "api/counters.def"
    CHECK_EQUAL(skipped, 5);
    CHECK_EQUAL(counter_now(table, "background"), (unsigned)calm_governor.settings.background);
    CHECK_EQUAL(counter_now(table, "policy"), (unsigned)calm_governor.settings.policy);
}

/* What this machine need not show: it may have one depot, and rows read in vain give the same sum. */
static void check_cached_terms(void) {
    const struct counter_table *table = counter_table_of("calmalloc");
    bool depots = false;
    bool caches = false;
    for (size_t i = 0; i < table->count; i++) {
        const struct counter_term *term = &table->terms[i];
        CHECK((term->rows == NULL) == (term->present == NULL));
        caches |= term->rows != NULL;
        depots |=
            term->at == &calm_governor.depots[0].bins && term->pointers == MAX_DEPOTS &&
            (const char *)term->at + term->pointer_stride == (const char *)&calm_governor.depots[1].bins;
    }
    CHECK(caches && depots);
}

/* What a process outside would read is what calm_stats says, whatever happens in between. */
static void test_counters(void) {
    const struct counter_table *table = counter_table_of("calmalloc");
    check_cached_terms();
    check_counters();
    for (size_t number = 0; number < steps; number++) {
        step(number);
        if (number % 100 == 0) {
            check_counters();
        }
    }
    struct calm_stats stats = stats_now();
    CHECK(stats.purged > 0 && stats.cached > 0 && stats.retained > 0);
    CHECK(counter_now(table, "limit_checks") > 0 && counter_now(table, "purge_ns") > 0);
    set("memory_per_cpu", "1");
    check_counters();
    free_all();
    check_counters();
    CHECK(calm_trim(0) > 0);
    check_counters();
    CHECK_EQUAL(counter_now(table, "cached"), 0);
    obtain(3 * MIB);
    /* As in the midst of a purge, which is over before anybody looks. */
    calm_governor.heap.claimed_pages += 3;
    calm_governor.heap.purging_pages += 5;
    struct calm_stats midst = stats_now();
    CHECK_EQUAL(counter_now(table, "footprint"), midst.footprint);
    CHECK_EQUAL(counter_now(table, "in_use"), midst.in_use);
    CHECK_EQUAL(counter_now(table, "retained"), midst.retained);
    calm_governor.heap.claimed_pages -= 3;
    calm_governor.heap.purging_pages -= 5;
    /* A bound that only a helper allows, which the child does not have. */
    free_all();
    governor_start_background(&calm_governor);
    calm_free(obtain(32 * MIB));
    check_counters();
    uint64_t limit = counter_now(table, "retained_limit");
    struct calm_stats before = stats_now();
    pid_t child = fork();
    CHECK(child >= 0);
    check_counters();
    if (child == 0) {
        /* Totals from the fork on, and levels as they were. */
        struct calm_stats now = stats_now();
        CHECK_EQUAL(now.in_use, before.in_use);
        CHECK_EQUAL(now.dirtied + now.purged + now.purges_limit + now.purges_request + now.cache_misses, 0);
        CHECK_EQUAL(now.large_allocations + now.limit_checks + now.purge_ns + now.purge_ranges, 0);
        CHECK(before.dirtied > 0 && before.purged > 0 && before.limit_checks > 0);
        /* Only to tell them apart: nobody looks at them before they are what they were. */
        atomic_store(&calm_governor.settings.policy, 1);
        atomic_store(&calm_governor.settings.background, 2);
        check_counters();
        atomic_store(&calm_governor.settings.policy, 0);
        atomic_store(&calm_governor.settings.background, 0);
        CHECK(counter_now(table, "retained_limit") < limit);
        obtain(5 * MIB);
        check_counters();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- counters ---- */

enum { MISSING_THREADS = 4 * MISS_COUNTERS, MISSES_EACH = 2000 };

static void *miss(void *unused) {
    uint32_t class = size_class_of(calm_governor.heap.classes, 64);
    void *block;
    for (size_t i = 0; i < MISSES_EACH / 2; i++) {
        CHECK_EQUAL(governor_take_blocks(&calm_governor, class, &block, 1, false), 1);
        governor_put_blocks(&calm_governor, class, &block, 1);
    }
    return unused;
}

/* More threads than counters: of those that share one, none loses what another counted. */
static void test_misses_of_many_threads(void) {
    calm_free(obtain(1));
    uint64_t before = governor_cache_misses(&calm_governor);
    pthread_t threads[MISSING_THREADS];
    for (size_t i = 0; i < MISSING_THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, miss, NULL) == 0);
    }
    for (size_t i = 0; i < MISSING_THREADS; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK_EQUAL(governor_cache_misses(&calm_governor) - before, MISSING_THREADS * MISSES_EACH);
}

int main(void) {
    /* The tests' processes are no family: each has a page of its own. */
    static _Alignas(4096) char page[4096];
    calm_governor.family.page = (struct family_page *)page;
    calm_governor.family.member = 7;
    setvbuf(stdout, NULL, _IOLBF, 0);
    steps = check_rounds(steps);
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    all_cpus = cpus_possible();
    random_state = check_seed(88172645463325252U);
    clock_stop();
    clock_set_step(1000); /* whatever is measured takes some time */
    clock_set_cpu_step(1000);
    in_child(test_helper);
    if (WATCHES_THREADS) {
        return 0;
    }
    in_child(test_lone_thread);
    in_child(test_waves);
    in_child(test_waves_of_two_kinds);
    in_child(test_room);
    in_child(test_scarce_memory_costs_more);
    in_child(test_scarcity_is_read);
    in_child(test_family);
    in_child(test_overdue);
    in_child(test_epoch_of_the_future);
    in_child(test_refused_helper);
    in_child(test_lone_thread_beside_helper);
    in_child(test_helper_opens_no_files);
    in_child(test_room_read_at_start);
    in_child(test_fork_gives_back_once_an_epoch);
    in_child(test_child_keeps_little);
    in_child(test_fork_gives_back);
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_stopped_purger);
    in_child(test_paper_bound);
    in_child(test_adaptive_bound);
    in_child(test_price);
    in_child(test_denied_from_the_start);
    in_child(test_denied_later);
    in_child(test_vectored_off);
    in_child(test_locked_pages);
    in_child(test_locked_blocks);
    in_child(test_all_locked);
    in_child(test_unlocked_later);
    in_child(test_trim);
    in_child(test_preempted_purge);
    in_child(test_unused_goes);
    in_child(test_bound_after_shedding);
    in_child(test_grown_and_gone);
    in_child(test_usable_memory_is_reserved_again);
    in_child(test_clean_memory_is_examined);
    in_child(test_parts_of_huge_pages);
    in_child(test_new_pages_touched);
    in_child(test_zeros_are_not_resident);
    in_child(test_depot_grows);
    in_child(test_depots_of_other_cpus);
    in_child(test_lone_thread_without_helper);
    in_child(test_owner_takes_no_lock);
    in_child(test_fork_beside_stopped_owner);
    in_child(test_owner_has_whole_magazines);
    in_child(test_frees_between_slices);
    in_child(test_frees_between_slices_of_a_tick);
    in_child(test_owner_keeps_misuse);
    in_child(test_owner_makes_large_blocks_ready);
    in_child(test_owner_makes_nothing_ready_in_vain);
    in_child(test_exclusive_thread_flushes_prefilled);
    in_child(test_owner_is_idle);
    in_child(test_misses_of_many_threads);
    in_child(test_counters);
    return 0;
}
