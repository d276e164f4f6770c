/*
 * Purges: whatever the kernel refuses, the delays while memory cannot be purged, and what a trim gives back.
 */
#include "arena/purger.h"

#include "arena/epoch.h"
#include "deny_vectored.h"
#include "whole_allocator.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

/* How long locked memory cannot be given back, and what is done in each millisecond. */
#define LOCKED_MS     500
#define LOCKED_ROUNDS 40

static void test_denied_from_the_start(void) {
    deny_vectored(EPERM, false);
    set("test_policy", "paper");
    run_within(1, 1, 1);
    struct calm_stats stats = stats_now();
    CHECK(stats.purge_vectored_calls == 0 && stats.purge_single_calls > 0);
    calm_trim(0);
    CHECK_EQUAL(stats_now().dirty, 0);
}

static void test_denied_later(void) {
    run_briefly_within(1, UNTENDED, 1);
    uint64_t before = stats_now().purge_vectored_calls;
    deny_vectored(ENOSYS, false);
    run_within(1, UNTENDED, 1);
    struct calm_stats stats = stats_now();
    CHECK(stats.purge_vectored_calls == before && stats.purge_single_calls > 0);
    calm_trim(0);
    CHECK_EQUAL(stats_now().dirty, 0);
}

static void test_vectored_off(void) {
    set("vectored_purge", "off");
    run_within(1, UNTENDED, 1);
    CHECK_EQUAL(stats_now().purge_vectored_calls, 0);
    set("vectored_purge", "on");
    run_briefly_within(1, UNTENDED, 1);
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
            void *other = obtain(10 * page_size);
            calm_free(one);
            calm_free(other);
        }
        clock_advance(CLOCK_MS);
    }
    struct calm_stats after = stats_now();
    printf("locked: %llu failures at once, %llu more in %d ms, %llu KiB dirty of %llu\n",
           (unsigned long long)before.purge_failures,
           (unsigned long long)(after.purge_failures - before.purge_failures), LOCKED_MS,
           (unsigned long long)after.dirty >> 10, (unsigned long long)after.dirty_limit >> 10);
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
    CHECK_EQUAL(stats_now().dirty, 0);
    check_heap();
    run_briefly_within(1, 1, 1);
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
    CHECK(stats_now().dirty > stats_now().dirty_limit);
    CHECK(syscall(SYS_munlock, locked, 8 * MIB) == 0);
    for (unsigned ms = 0; stats_now().dirty > stats_now().dirty_limit; ms++) {
        CHECK(ms < 50); /* two waits of ten milliseconds, and twice as long, and the looks between them */
        clock_advance(CLOCK_MS);
        /* Of sizes that no cache keeps. */
        calm_free(obtain(uncached_bytes()));
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
    CHECK_EQUAL(after.dirty, 0);
    CHECK_EQUAL(after.cached, 0);
    CHECK_EQUAL(after.purged - before.purged, given);
    CHECK_EQUAL(calm_trim(0), 0);
    free_all();
    calm_trim(64 * page_size);
    CHECK(stats_now().dirty <= 64 * page_size);
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
    CHECK_EQUAL(calm_arenas.counts.purge_ns, 0);
}

/* ---- a purger that is stopped ---- */

int main(void) {
    prepare_governor();
    set("background", "off"); /* the rest would be done by a helper, too, in its own time */
    in_child(test_denied_from_the_start);
    in_child(test_denied_later);
    in_child(test_vectored_off);
    in_child(test_locked_pages);
    in_child(test_locked_blocks);
    in_child(test_all_locked);
    in_child(test_unlocked_later);
    in_child(test_trim);
    in_child(test_preempted_purge);
    return 0;
}
