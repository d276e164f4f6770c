/*
 * The whole native allocator by its calm_ names, so that sanitizers can check it: threads allocate at random
 * and exchange blocks, while memory is trimmed, the counters are read, and the process forks. At intervals
 * all threads stop, and the heap must be consistent and within its limits.
 *
 * Compiled once more with libcalmoffload's sources, and OFFLOADED.
 */
#include "calmalloc.h"

#include "api/allocator.h"
#include "api/options.h"
#include "arena/arena.h"
#include "arena/limit.h"
#include "heap/walk.h"

#include "check.h"
#include "child_threads.h"
#include "test_clock.h"

#ifdef OFFLOADED
#include "offload/offload.h"
#endif

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#if defined(__SANITIZE_THREAD__)
#define ROUND_OPERATIONS 8000
#elif defined(__SANITIZE_ADDRESS__)
#define ROUND_OPERATIONS 20000
#else
#define ROUND_OPERATIONS 40000
#endif

#define WORKERS   4
#define SLOTS     600
#define EXCHANGE  64
#define MAX_LARGE ((size_t)1 << 20)
#define WAVE      200 /* operations */
#define ROUND_MS  500 /* by the clock that the workers drive */
#define SKIPPED   77

struct block {
    unsigned char *start;
    size_t bytes;
    uint64_t mark;
};

struct worker {
    pthread_t thread;
    uint64_t random;
    struct block blocks[SLOTS];
};

static struct worker workers[WORKERS];
static struct {
    pthread_mutex_t mutex;
    struct block block;
} exchange[EXCHANGE];

static pthread_barrier_t parked;
static pthread_barrier_t released;
static _Atomic(bool) pause_now;
static _Atomic(bool) stop;
static _Atomic(uint64_t) operations;
static uint64_t rounds = 30;
static uint64_t seed;

/* ---- what blocks hold ---- */

static size_t step_of(size_t bytes) {
    return bytes <= 512 ? 1 : bytes <= 16384 ? 64 : 4096;
}

static void fill(struct block *block) {
    for (size_t at = 0; at < block->bytes; at += step_of(block->bytes)) {
        block->start[at] = (unsigned char)(block->mark + at * 31);
    }
    if (block->bytes > 0) {
        block->start[block->bytes - 1] = (unsigned char)(block->mark >> 8);
    }
}

static void check(const struct block *block, size_t bytes) {
    size_t last = block->bytes - 1;
    for (size_t at = 0; at < bytes; at += step_of(block->bytes)) {
        if (at != last) {
            CHECK_EQUAL(block->start[at], (unsigned char)(block->mark + at * 31));
        }
    }
    if (bytes == block->bytes && bytes > 0) {
        CHECK_EQUAL(block->start[last], (unsigned char)(block->mark >> 8));
    }
}

/* ---- the operations ---- */

static size_t random_bytes(uint64_t *random) {
    static const size_t most[] = {64, 256, 1024, 8192, 65536, MAX_LARGE};
    uint64_t dice = check_random(random) % 100;
    size_t kind = dice < 40 ? 0 : dice < 65 ? 1 : dice < 80 ? 2 : dice < 91 ? 3 : dice < 98 ? 4 : 5;
    return check_random(random) % (most[kind] + 1);
}

static void obtain(struct block *block, uint64_t *random) {
    block->bytes = random_bytes(random);
    block->mark = check_random(random);
    size_t alignment = 16;
    switch (check_random(random) % 8) {
    case 0: {
        block->start = calm_calloc(block->bytes, 1);
        CHECK(block->start != NULL);
        for (size_t i = 0; i < block->bytes; i += block->bytes < 8192 ? 1 : 997) {
            CHECK_EQUAL(block->start[i], 0);
        }
        break;
    }
    case 1:
        alignment = (size_t)1 << check_random(random) % 16;
        block->start = calm_aligned_alloc(alignment, block->bytes);
        break;
    case 2: {
        void *aligned = NULL;
        alignment = (size_t)8 << check_random(random) % 8;
        CHECK_EQUAL(calm_posix_memalign(&aligned, alignment, block->bytes), 0);
        block->start = aligned;
        break;
    }
    default:
        block->start = calm_malloc(block->bytes);
    }
    CHECK(block->start != NULL);
    CHECK_EQUAL((uintptr_t)block->start % alignment, 0);
    CHECK(calm_malloc_usable_size(block->start) >= block->bytes);
    fill(block);
}

static void give_up(struct block *block, uint64_t *random) {
    check(block, block->bytes);
    if (check_random(random) % 4 == 0) {
        calm_free_sized(block->start, block->bytes);
    } else {
        calm_free(block->start);
    }
    block->start = NULL;
}

static void resize(struct block *block, uint64_t *random) {
    size_t bytes = random_bytes(random) + 1;
    if (check_random(random) % 4 == 0) {
        bytes = block->bytes + block->bytes / 2 + 1; /* as vectors grow */
        bytes = bytes < MAX_LARGE ? bytes : MAX_LARGE;
    }
    size_t kept = bytes < block->bytes ? bytes : block->bytes;
    unsigned char *moved = calm_realloc(block->start, bytes);
    CHECK(moved != NULL);
    block->start = moved;
    check(block, kept == block->bytes && kept > 0 ? kept : kept > 0 ? kept - 1 : 0);
    block->bytes = bytes;
    block->mark = check_random(random);
    fill(block);
}

static void hand_over(struct block *block, uint64_t *random) {
    size_t slot = check_random(random) % EXCHANGE;
    pthread_mutex_lock(&exchange[slot].mutex);
    struct block other = exchange[slot].block;
    exchange[slot].block = *block;
    pthread_mutex_unlock(&exchange[slot].mutex);
    *block = other;
}

static void work_at_random(struct block *blocks, uint64_t *random, bool grow, unsigned steps) {
    for (unsigned i = 0; i < steps; i++) {
        struct block *block = &blocks[check_random(random) % SLOTS];
        uint64_t dice = check_random(random) % 16;
        if (block->start == NULL) {
            if (grow || dice < 4) {
                obtain(block, random);
            }
        } else if (dice < 3) {
            resize(block, random);
        } else if (dice < 6) {
            hand_over(block, random);
        } else if (!grow || dice < 10) {
            give_up(block, random);
        }
    }
}

static void park(void) {
    if (atomic_load(&pause_now)) {
        pthread_barrier_wait(&parked);
        pthread_barrier_wait(&released);
    }
}

static void *run_worker(void *argument) {
    struct worker *worker = argument;
    for (unsigned wave = 0; !atomic_load(&stop); wave++) {
        work_at_random(worker->blocks, &worker->random, wave / 16 % 2 == 0, WAVE);
        atomic_fetch_add(&operations, WAVE);
        clock_advance(ROUND_MS * CLOCK_MS * WAVE / ROUND_OPERATIONS);
        park();
    }
    for (size_t i = 0; i < SLOTS; i++) {
        if (worker->blocks[i].start != NULL) {
            give_up(&worker->blocks[i], &worker->random);
        }
    }
    return NULL;
}

static void *run_briefly(void *argument) {
    uint64_t random = (uint64_t)(uintptr_t)argument;
    struct block block = {0};
    for (int i = 0; i < 50; i++) {
        if (block.start == NULL) {
            obtain(&block, &random);
        }
        hand_over(&block, &random);
    }
    if (block.start != NULL) {
        give_up(&block, &random);
    }
    return NULL;
}

/* Whether there is a server. */
static bool is_offloaded(void) {
#ifdef OFFLOADED
    return calm_offload.has_server;
#else
    return false;
#endif
}

static struct calm_stats stats_now(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, stats.in_use + stats.dirty);
    CHECK(stats.reserved >= stats.footprint);
    CHECK(stats.cached <= stats.cached_limit);
    return stats;
}

/* Trims, reads the counters, changes settings, and lets short threads come and go. */
static void *run_others(void *unused) {
    (void)unused;
    static char json[8192];
    uint64_t random = seed * 777;
    while (!atomic_load(&stop)) {
        switch (check_random(&random) % 8) {
        case 0:
            calm_trim(check_random(&random) % 2 == 0 ? 0 : (size_t)1 << 20);
            break;
        case 1:
            CHECK_EQUAL(calm_set("memory_per_cpu", check_random(&random) % 2 == 0 ? "auto" : "1"), 0);
            break;
        case 2: {
            pthread_t brief;
            CHECK(pthread_create(&brief, NULL, run_briefly, (void *)(check_random(&random) | 1)) == 0);
            CHECK(pthread_join(brief, NULL) == 0);
            break;
        }
        case 3:
            CHECK(calm_stats_json(json, sizeof json) > 0);
            break;
        default:
            stats_now();
        }
        check_nap(100000);
        park();
    }
    return NULL;
}

/* ---- the heap ---- */

/* Under the locks of a helper or a server, which may be at work. */
static void check_heap(void) {
    lock_acquire(&calm_arenas.purger.lock);
    lock_acquire(&calm_arenas.of[0].lock);
    heap_walk(&calm_arenas.of[0].heap, NULL, 0);
    lock_release(&calm_arenas.of[0].lock);
    lock_release(&calm_arenas.purger.lock);
}

/* ---- forks ---- */

static void live_as_child(void) {
    static struct block blocks[SLOTS];
    start_threads_elsewhere();
    check_heap();
    /* Threads that are not here may have held these. */
    for (size_t i = 0; i < EXCHANGE; i++) {
        exchange[i].block.start = NULL;
        CHECK(pthread_mutex_init(&exchange[i].mutex, NULL) == 0);
    }
    uint64_t random = (uint64_t)getpid();
    for (unsigned wave = 0; wave < 4; wave++) {
        work_at_random(blocks, &random, wave % 2 == 0, 500);
    }
    for (size_t i = 0; i < SLOTS; i++) {
        if (blocks[i].start != NULL) {
            give_up(&blocks[i], &random);
        }
    }
    stats_now();
    calm_trim(0);
    check_heap();
}

static uint64_t forks_done;

static void *run_forks(void *unused) {
    (void)unused;
    while (!atomic_load(&stop)) {
        in_child(live_as_child);
        forks_done++;
        check_nap(5000000);
        park();
    }
    return NULL;
}

/* ---- all stand still ---- */

/* The dirty memory above its limit. Not in the midst of a purge: each enforces the limit before it ends. */
static size_t excess_now(void) {
    const struct arenas *arenas = &calm_arenas;
    lock_acquire(&calm_arenas.purger.lock);
    lock_acquire(&calm_arenas.of[0].lock);
    size_t dirty =
        (heap_dirty_pages(&arenas->of[0].heap) + arenas->of[0].heap.purging_pages) * vm_page_size();
    size_t limit = limit_for(arenas, totals_now(arenas)).max * page_bytes(arenas);
    lock_release(&calm_arenas.of[0].lock);
    lock_release(&calm_arenas.purger.lock);
    return dirty > limit ? dirty - limit : 0;
}

static void check_parked(void) {
    check_heap();
    if (is_offloaded()) { /* the server may be about to leave the heap, and to purge */
        WAIT_UNTIL(excess_now() == 0);
    } else {
        CHECK_EQUAL(excess_now(), 0);
    }
    struct calm_stats stats = stats_now();
    CHECK_EQUAL(stats.purge_failures, 0);
    CHECK(is_offloaded() || stats.cached <= stats.in_use);
}

/* A server that the machine kept from its work for all rounds has more of them. */
static bool is_served(void) {
#ifdef OFFLOADED
    return !is_offloaded() || (atomic_load(&calm_offload.server.counts.prefilled) > 0 &&
                               atomic_load(&calm_offload.server.counts.calls) > 0);
#else
    return true;
#endif
}

static void run(void) {
    pthread_t others;
    pthread_t forks;
    for (size_t i = 0; i < EXCHANGE; i++) {
        CHECK(pthread_mutex_init(&exchange[i].mutex, NULL) == 0);
    }
    CHECK(pthread_barrier_init(&parked, NULL, WORKERS + 3) == 0);
    CHECK(pthread_barrier_init(&released, NULL, WORKERS + 3) == 0);
    for (size_t i = 0; i < WORKERS; i++) {
        workers[i].random = (i + seed) * 2654435761U;
        CHECK(pthread_create(&workers[i].thread, NULL, run_worker, &workers[i]) == 0);
    }
    CHECK(pthread_create(&others, NULL, run_others, NULL) == 0);
    CHECK(pthread_create(&forks, NULL, run_forks, NULL) == 0);
    double end = check_seconds() + TIMEOUT_S * (double)rounds;
    for (uint64_t round = 1; round <= rounds || !is_served(); round++) {
        CHECK(check_seconds() < end);
        while (atomic_load(&operations) < round * ROUND_OPERATIONS) {
            check_nap(1000000);
        }
        atomic_store(&pause_now, true);
        pthread_barrier_wait(&parked);
        atomic_store(&pause_now, false);
        check_parked();
        pthread_barrier_wait(&released);
    }
    atomic_store(&stop, true);
    for (size_t i = 0; i < WORKERS; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
    CHECK(pthread_join(others, NULL) == 0);
    CHECK(pthread_join(forks, NULL) == 0);
    struct calm_stats stats = stats_now();
    printf("%llu operations, %llu rounds, %llu forks, %llu purges, %llu timed, %llu asked, %llu moves, %llu "
           "drains\n",
           (unsigned long long)operations, (unsigned long long)rounds, (unsigned long long)forks_done,
           (unsigned long long)stats.purges_limit, (unsigned long long)stats.purges_epoch,
           (unsigned long long)stats.purges_request, (unsigned long long)stats.large_moves,
           (unsigned long long)stats.cache_flushes);
    CHECK(stats.purges_request > 0);
    CHECK(is_offloaded() || stats.purges_limit + stats.purges_epoch > 0);
}

/* A server may prefill once more what a thread missed before. */
static bool has_settled(void) {
    calm_trim(0);
    struct calm_stats stats = stats_now();
    return stats.cached + stats.in_use + stats.dirty == 0;
}

/* The heap is empty once the caches are. */
static void check_empty(void) {
    uint64_t random = 1;
    for (size_t i = 0; i < EXCHANGE; i++) {
        if (exchange[i].block.start != NULL) {
            give_up(&exchange[i].block, &random);
        }
    }
    if (is_offloaded()) {
        WAIT_UNTIL(has_settled());
    } else {
        CHECK(has_settled());
    }
    check_heap();
}

/* test_allocator [rounds] */
int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed = check_seed(1);
    rounds = check_rounds(argc > 1 ? strtoull(argv[1], NULL, 10) : rounds);
    /* A thread without the C library's is none to ThreadSanitizer. */
    CHECK(!WATCHES_THREADS || calm_set("background", "off") == 0);
#ifdef OFFLOADED
    if (!is_offloaded()) {
        return SKIPPED; /* it said why */
    }
#else /* a server and its clients wait for each other by the time, too */
    clock_stop();
    clock_set_step(1000); /* whatever is measured takes some time */
    clock_set_cpu_step(1000);
#endif
    run();
    check_empty();
    return 0;
}
