/*
 * The whole allocator by its calm_ names, with its arena, under a clock that the test drives: a program of
 * random steps, and the limits that must hold after each.
 */
#ifndef CALM_TESTS_WHOLE_ALLOCATOR_H
#define CALM_TESTS_WHOLE_ALLOCATOR_H

#include "calmalloc.h"

#include "api/allocator.h"
#include "arena/arena.h"
#include "arena/helper.h"
#include "heap/walk.h"
#include "os/cpus.h"
#include "policy/hysteresis.h"
#include "policy/retention.h"

#include "check.h"
#include "pages.h"
#include "test_clock.h"

#define KIB   1024UL
#define MIB   (1UL << 20)
#define SLOTS 3000

/* What one step of a program takes: several epochs pass in a run. */
#define STEP_NS 20000U

static size_t steps = 60000;
static unsigned all_cpus; /* that the system may have */
static void *blocks[SLOTS];
static uint64_t random_state;

static inline size_t below(size_t bound) {
    return check_random(&random_state) % bound;
}

static inline struct calm_stats stats_now(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, stats.in_use + stats.dirty);
    return stats;
}

static inline void set(const char *name, const char *value) {
    CHECK_EQUAL(calm_set(name, value), 0);
}

static inline void *obtain(size_t bytes) {
    char *block = calm_malloc(bytes);
    CHECK(block != NULL);
    for (size_t at = 0; at < bytes; at += page_size) {
        block[at] = 1;
    }
    return block;
}

static inline void step(size_t number) {
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

/* Caches keep blocks of up to eight pages. */
static inline size_t uncached_bytes(void) {
    return 16 * page_size;
}

static inline void free_all(void) {
    for (size_t i = 0; i < SLOTS; i++) {
        calm_free(blocks[i]);
        blocks[i] = NULL;
    }
}

static inline size_t most(size_t a, size_t b) {
    return a > b ? a : b;
}

/* What the adaptive policy may keep, of table 1. */
#define UNTENDED RETENTION_FOREGROUND_FACTOR
#define TENDED   1e9 /* as much as the program used of late */

/* Table 1 times the band, and the CPUs' hundredths. The limit is never below 16 pages. */
static inline void check_limit(const struct calm_stats *stats, double min_band, double max_band,
                               double factor) {
    double base = (double)hysteresis_base_bytes(stats->footprint) * factor;
    double cpus = 1 + (double)all_cpus / 100;
    size_t little = max_band > 1 ? RETENTION_FOREGROUND_BYTES : 16 * page_size;
    CHECK((double)stats->dirty_limit <= (double)most((size_t)(base * max_band * cpus), little));
    CHECK((double)stats->dirty_limit + (double)page_size >= base * min_band);
    CHECK(stats->dirty <= stats->dirty_limit);
    CHECK(stats->cached <= stats->cached_limit);
}

static inline void run_for(size_t count, double min_band, double max_band, double factor) {
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

static inline void run_within(double min_band, double max_band, double factor) {
    run_for(steps, min_band, max_band, factor);
}

/* Before or after what a test is about: one wave. */
static inline void run_briefly_within(double min_band, double max_band, double factor) {
    run_for(steps / 5, min_band, max_band, factor);
}

static inline void run_steps(void) {
    for (size_t number = 0; number < steps; number++) {
        step(number);
    }
    free_all();
}

static inline void check_heap(void) {
    lock_acquire(&calm_arenas.purger.lock);
    heap_walk(&calm_arenas.of[0].heap, NULL, 0);
    lock_release(&calm_arenas.purger.lock);
}

/* For which memory is kept of which nothing is known, once an epoch has ended; and a few more. */
static inline unsigned break_even_epochs(void) {
    return (unsigned)(calm_arenas.work->demand.break_even_s * 1e9 / (double)DEMAND_EPOCH_NS) + 3;
}

/* ---- the helper, and waves of blocks ---- */

static inline enum clock_sleep helper_sleep(void) {
    return clock_sleep_of(&calm_arenas.helper.wakeup);
}

static inline bool helper_is_gone(void) {
    return thread_is_gone(&calm_arenas.helper.thread);
}

/* An epoch passes, and the helper has done what it does then. */
static inline void pass_epoch(void) {
    clock_advance(DEMAND_EPOCH_NS);
    WAIT_UNTIL(helper_is_gone() || helper_sleep() == ASLEEP_FOR_A_WHILE);
}

/* Epochs until the helper ends. */
static inline unsigned epochs_to_end(void) {
    unsigned epochs = 0;
    while (!helper_is_gone()) {
        CHECK(epochs < 100);
        pass_epoch();
        epochs++;
    }
    return epochs;
}

enum { WAVE = 400 };

/* Of each block of a wave, which no cache keeps. */
static inline size_t wave_bytes(void) {
    return most(256 * KIB, uncached_bytes());
}

static inline void build(void) {
    for (size_t i = 0; i < WAVE; i++) {
        blocks[i] = obtain(wave_bytes());
    }
}

/* So much CPU time is used, and the helper looks at the clock. */
static inline void pass_epochs(size_t count, uint64_t cpu_ns) {
    for (size_t i = 0; i < count; i++) {
        clock_use_cpu(cpu_ns, 0);
        pass_epoch();
    }
}

/* What a test begins with; each of its parts then runs in a child. */
static inline void prepare_governor(void) {
    /* The tests' processes are no family: each has a page of its own. */
    static _Alignas(4096) char page[4096];
    calm_arenas.epoch.family.page = (struct family_page *)page;
    calm_arenas.epoch.family.member = 7;
    setvbuf(stdout, NULL, _IOLBF, 0);
    steps = check_rounds(steps);
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    all_cpus = cpus_possible();
    random_state = check_seed(88172645463325252U);
    /* One price of memory, whatever this machine has of it, and has left. */
    set("memory_per_cpu", "12");
    set("test_cgroup", "off");
    clock_stop();
    clock_set_step(1000); /* whatever is measured takes some time */
    clock_set_cpu_step(1000);
}

#endif
