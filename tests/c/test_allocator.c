/*
 * The whole native allocator by its calm_ names, so that sanitizers can check it: threads allocate at random
 * and exchange blocks, while memory is trimmed, the counters are read, and the process forks. At intervals
 * all threads stop, and the heap must be consistent and within its limits.
 *
 * Also in offload mode, if CALM_OPTIONS selects it; then the server checks the heap.
 */
#include "calmalloc.h"

#include "api/allocator.h"
#include "api/options.h"
#include "governor/governor.h"
#include "governor/limit.h"
#include "heap/walk.h"

#include "check.h"
#include "test_clock.h"

#ifdef CALM_OFFLOAD
#include "offload/backend_offload.h"
#include "offload/client.h"
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

static bool is_offloaded(void) {
#ifdef CALM_OFFLOAD
    return calm_allocator.backend == &calm_offload.backend;
#else
    return false;
#endif
}

/* Of a server that does not answer in time they are read as they happen to be, one after the other. */
static struct calm_stats stats_about(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    CHECK_EQUAL(stats.footprint, stats.in_use + stats.retained);
    return stats;
}

static struct calm_stats stats_now(void) {
    struct calm_stats stats = stats_about();
    CHECK(stats.reserved >= stats.footprint);
    CHECK(stats.cached <= stats.cached_limit);
    return stats;
}

/* Repeats `what` until it ran without the server being unresponsive. There must be no other client. */
static void have_served(void (*what)(void)) {
#ifdef CALM_OFFLOAD
    uint64_t losses;
    do {
        while (is_offloaded() && atomic_load(&calm_offload.server.unresponsive_from_ns)) {
            check_nap(1000000);
        }
        losses = atomic_load(&calm_offload.server.unresponsive);
        what();
    } while (atomic_load(&calm_offload.server.unresponsive) != losses);
#else
    what();
#endif
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
            is_offloaded() ? stats_about() : stats_now();
        }
        check_nap(100000);
        park();
    }
    return NULL;
}

/* ---- the heap ---- */

static void walk(void *unused) {
    (void)unused;
    heap_walk(&calm_governor.heap, NULL, 0);
}

#ifdef CALM_OFFLOAD
/* Of a server that the machine keeps from its work, again: a heap that it may be in the midst of is in no
 * order.
 */
static enum answer run_by_server(enum request_kind kind, void (*work)(void *subject), void *subject) {
    struct request request = {.kind = kind, .work = work, .subject = subject};
    enum answer answer;
    do {
        answer = client_ask(&calm_offload.server, 0, &request);
        check_nap(answer == ANSWER_UNRESPONSIVE ? 1000000 : 0);
    } while (answer == ANSWER_UNRESPONSIVE && !calm_offload.server.orphaned);
    return answer;
}

/* At the heap: by its server, or, of a heap that has none, or is shared, by this thread. */
static void at_heap(enum request_kind kind, void (*by_server)(void *subject), void (*work)(void *subject),
                    void *subject) {
    while (is_offloaded()) {
        if (run_by_server(kind, by_server, subject) != ANSWER_SHARED) {
            return;
        }
        struct endpoint *shared = client_enter_shared(&calm_offload.server, 0);
        if (shared != NULL) {
            work(subject);
            client_leave_shared(shared);
            return;
        }
    }
    work(subject);
}
#else
enum request_kind { REQUEST_RUN, REQUEST_RUN_LONG };

static void at_heap(enum request_kind kind, void (*by_server)(void *subject), void (*work)(void *subject),
                    void *subject) {
    (void)kind, (void)by_server;
    work(subject);
}
#endif

/* A helper may be at work all the same: under its lock it is not. */
static void walk_by_lock(void *unused) {
    lock_acquire(&calm_governor.purge_lock);
    lock_acquire(&calm_governor.lock);
    walk(unused);
    lock_release(&calm_governor.lock);
    lock_release(&calm_governor.purge_lock);
}

static void check_heap(void) {
    at_heap(REQUEST_RUN, walk, walk_by_lock, NULL);
}

/* ---- forks ---- */

#if WATCHES_THREADS
/* A child starts its server, which is a thread. */
const char *__tsan_default_options(void);
const char *__tsan_default_options(void) {
    return "die_after_fork=0:atexit_sleep_ms=10";
}

/* Not on the stack of a thread of the parent's: by that ThreadSanitizer knows a thread. */
static void start_threads_elsewhere(void) {
    pthread_attr_t attributes;
    size_t bytes;
    CHECK(pthread_getattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_getstacksize(&attributes, &bytes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 2 * bytes) == 0);
    CHECK(pthread_setattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
}
#else
static void start_threads_elsewhere(void) {
}
#endif

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
    stats_about();
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

static struct calm_stats parked_stats;

static void read_stats(void) {
    parked_stats = stats_about();
}

/* What is retained above its limit. A server is not in the midst of a purge then: this is long work to it. */
static void read_excess(void *subject) {
    const struct governor *governor = &calm_governor;
    lock_acquire(&calm_governor.lock);
    size_t retained = (heap_dirty_pages(&governor->heap) + governor->heap.purging_pages) * vm_page_size();
    size_t limit = limit_now(governor).max * page_bytes(governor);
    lock_release(&calm_governor.lock);
    *(size_t *)subject = retained > limit ? retained - limit : 0;
}

static size_t excess_now(void) {
    size_t excess = 0;
    at_heap(REQUEST_RUN_LONG, read_excess, read_excess, &excess);
    return excess;
}

static void check_parked(void) {
    check_heap();
    size_t excess = excess_now();
    have_served(read_stats);
    struct calm_stats stats = parked_stats;
    if (excess > 0) {
        fprintf(stderr, "retained %llu, limit %llu, footprint %llu, purges %llu, timed %llu, asked %llu\n",
                (unsigned long long)stats.retained, (unsigned long long)stats.retained_limit,
                (unsigned long long)stats.footprint, (unsigned long long)stats.purges_limit,
                (unsigned long long)stats.purges_epoch, (unsigned long long)stats.purges_request);
    }
    CHECK_EQUAL(excess, 0);
    CHECK(stats.reserved >= stats.footprint);
    CHECK(stats.cached <= stats.cached_limit);
    CHECK_EQUAL(stats.purge_failures, 0);
    CHECK(stats.cached <= stats.in_use);
}

/* A server that the machine kept from its work for all rounds has more of them. */
static bool is_served(void) {
    return !is_offloaded() || (parked_stats.offload_hits > 0 && parked_stats.offload_calls > 0);
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
    have_served(read_stats);
    struct calm_stats stats = parked_stats;
    printf("%llu operations, %llu rounds, %llu forks, %llu purges, %llu timed, %llu asked, %llu moves, %llu "
           "drains\n",
           (unsigned long long)operations, (unsigned long long)rounds, (unsigned long long)forks_done,
           (unsigned long long)stats.purges_limit, (unsigned long long)stats.purges_epoch,
           (unsigned long long)stats.purges_request, (unsigned long long)stats.large_moves,
           (unsigned long long)stats.cache_flushes);
    CHECK(stats.purges_request > 0);
    CHECK(is_offloaded() || stats.purges_limit + stats.purges_epoch > 0);
    if (is_offloaded()) {
        printf("%llu hits, %llu misses, %llu calls, %llu records, %llu stocked, %llu unused, %llu lost\n",
               (unsigned long long)stats.offload_hits, (unsigned long long)stats.offload_misses,
               (unsigned long long)stats.offload_calls, (unsigned long long)stats.offload_messages,
               (unsigned long long)stats.offload_prefilled, (unsigned long long)stats.offload_prefill_unused,
               (unsigned long long)stats.offload_unresponsive);
    }
}

static void trim_all(void) {
    calm_trim(0);
}

/* A server may find what was freed on another CPU only after a trim that was asked for on this one. */
static bool has_settled(void) {
    have_served(trim_all);
    have_served(read_stats);
    return !is_offloaded() || parked_stats.cached + parked_stats.in_use + parked_stats.retained == 0;
}

/* Only prefilled blocks are left: the heap is empty once the caches are. */
static void check_empty(void) {
    uint64_t random = 1;
    for (size_t i = 0; i < EXCHANGE; i++) {
        if (exchange[i].block.start != NULL) {
            give_up(&exchange[i].block, &random);
        }
    }
    WAIT_UNTIL(has_settled());
    check_heap();
    CHECK_EQUAL(parked_stats.cached, 0);
    CHECK_EQUAL(parked_stats.in_use, 0);
    CHECK_EQUAL(parked_stats.retained, 0);
    if (is_offloaded() && parked_stats.offload_shared_switches == 0) {
        CHECK_EQUAL(parked_stats.heap_locks, 0);
    }
#ifdef CALM_OFFLOAD
    struct governor *second = atomic_load(&calm_offload.second_made) > 0 ? &calm_offload.second : NULL;
    if (second != NULL) {
        heap_walk(&second->heap, NULL, 0);
        CHECK_EQUAL(heap_used_pages(&second->heap), 0);
    }
#endif
}

/* test_allocator [rounds] */
int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed = check_seed(1);
    rounds = check_rounds(argc > 1 ? strtoull(argv[1], NULL, 10) : rounds);
    /* A thread without the C library's is none to ThreadSanitizer. */
    CHECK(!WATCHES_THREADS || calm_set("background", "off") == 0);
    if (calm_options.offload != OPTION_OFFLOAD_OFF && !is_offloaded()) {
        return SKIPPED; /* it said why */
    }
    if (!is_offloaded()) { /* whose threads wait for each other by the time, too */
        clock_stop();
        clock_set_step(1000); /* whatever is measured takes some time */
        clock_set_cpu_step(1000);
    }
    run();
    check_empty();
    return 0;
}
