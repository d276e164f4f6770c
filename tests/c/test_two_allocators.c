/*
 * Two allocators in one process, each of a heap, its governor, CPU caches and a backend, in CACHE_LOCKED: a
 * block returns to the heap that it came from, and what happens to one allocator leaves the other as it is.
 */
#include "api/allocator.h"
#include "cache/cpu_cache.h"
#include "check.h"
#include "governor/blocks.h"
#include "governor/governor.h"
#include "heap/walk.h"

#include <pthread.h>
#include <string.h>

#define ALLOCATORS 2
#define THREADS    4
#define SLOTS      600

static struct governor governors[ALLOCATORS];
static struct cpu_caches caches[ALLOCATORS] = {CPU_CACHES_UNREADY, CPU_CACHES_UNREADY};
static struct backend backends[ALLOCATORS];
static struct allocator allocators[ALLOCATORS];
static _Atomic(size_t) misuses[ALLOCATORS];

struct worker {
    pthread_t thread;
    uint64_t random;
    struct slot {
        uint64_t *block;
        uint32_t class;
        unsigned allocator;
    } slots[SLOTS];
};

static struct size_classes classes;
static struct worker workers[THREADS];
static size_t rounds = 100000;
static _Atomic(size_t) flushed;

struct flush {
    struct governor *governor;
    size_t count;
};

static void flush_into(void *context, void *const *blocks, size_t count) {
    struct flush *flush = context;
    struct governor *governor = flush->governor;
    flush->count += count;
    lock_acquire(&governor->lock);
    heap_put_blocks(&governor->heap, blocks, count);
    lock_release(&governor->lock);
}

static size_t flush(unsigned allocator) {
    struct flush flush = {&governors[allocator], 0};
    for (unsigned number = 0; number < caches[allocator].count; number++) {
        cpu_cache_flush(&caches[allocator], number, false, flush_into, &flush);
    }
    return flush.count;
}

static size_t cached(unsigned allocator) {
    size_t bytes;
    return cpu_caches_blocks(&caches[allocator], &bytes);
}

/* In the first word and the last. */
static uint64_t mark_of(const struct slot *slot) {
    return (uint64_t)(uintptr_t)slot->block * 31 + slot->allocator;
}

static void take(struct slot *slot, uint32_t class, unsigned allocator) {
    uint64_t *block = allocator_allocate(&allocators[allocator], classes.of[class].size);
    *slot = (struct slot){block, class, allocator};
    CHECK_EQUAL(heap_class_at(&governors[allocator].heap, block), (int)class);
    CHECK_EQUAL(heap_class_at(&governors[!allocator].heap, block), -1);
    block[0] = block[classes.of[class].size / 8 - 1] = mark_of(slot);
}

static void put(struct slot *slot) {
    CHECK_EQUAL(slot->block[0], mark_of(slot));
    CHECK_EQUAL(slot->block[classes.of[slot->class].size / 8 - 1], mark_of(slot));
    allocator_release(&allocators[slot->allocator], slot->block);
    slot->block = NULL;
}

static void *work(void *argument) {
    struct worker *worker = argument;
    for (size_t round = 0; round < rounds; round++) {
        struct slot *slot = &worker->slots[check_random(&worker->random) % SLOTS];
        if (slot->block != NULL) {
            put(slot);
        } else {
            take(slot, 1 + (uint32_t)(check_random(&worker->random) % (classes.count - 1)),
                 (unsigned)(check_random(&worker->random) % ALLOCATORS));
        }
        if (check_random(&worker->random) % 4096 == 0) {
            flushed += flush((unsigned)(check_random(&worker->random) % ALLOCATORS));
        }
    }
    return NULL;
}

static void misused_first(const struct misuse_record *misuse) {
    (void)misuse;
    misuses[0]++;
}

static void misused_second(const struct misuse_record *misuse) {
    (void)misuse;
    misuses[1]++;
}

static void start(void) {
    static void (*const misused[ALLOCATORS])(const struct misuse_record *) = {misused_first, misused_second};
    for (unsigned i = 0; i < ALLOCATORS; i++) {
        CHECK(cpu_caches_init(&caches[i], &classes, (struct rseq_offsets){0}));
        CHECK(governor_init(&governors[i], &classes, &caches[i], (size_t)1 << 36, false, misused[i]));
        backend_direct_open(&backends[i], &governors[i]);
        cpu_caches_start(&caches[i], CACHE_LOCKED, true);
        allocators[i] = (struct allocator){classes, &governors[i], &caches[i], &backends[i], SIZE_MAX};
    }
}

static void test_apart(void) {
    struct slot slots[ALLOCATORS];
    take(&slots[0], 1, 0);
    CHECK_EQUAL(cached(0), classes.of[1].batch - 1U);
    CHECK_EQUAL(cached(1), 0);
    CHECK_EQUAL(heap_used_pages(&governors[1].heap), 0);
    take(&slots[1], 1, 1);
    put(&slots[0]);
    CHECK_EQUAL(flush(0), classes.of[1].batch);
    CHECK_EQUAL(heap_used_pages(&governors[0].heap), 0);
    CHECK_EQUAL(cached(1), classes.of[1].batch - 1U);
    CHECK_EQUAL(caches[0].flushes, 1);
    CHECK_EQUAL(caches[1].flushes, 0);
    put(&slots[1]);
}

static void test_large(void) {
    char *blocks[ALLOCATORS];
    for (unsigned i = 0; i < ALLOCATORS; i++) {
        blocks[i] = allocator_allocate(&allocators[i], 1 << 20);
        memset(blocks[i], 1, 1 << 20);
        CHECK(heap_large_span(&governors[i].heap, blocks[i]) != NULL);
        CHECK(heap_large_span(&governors[!i].heap, blocks[i]) == NULL);
    }
    allocator_release(&allocators[0], blocks[0]);
    CHECK(heap_large_span(&governors[0].heap, blocks[0]) == NULL);
    CHECK(heap_large_span(&governors[1].heap, blocks[1]) != NULL);
    allocator_release(&allocators[1], blocks[1]);
}

static void test_settings(void) {
    governors[0].settings.memory_per_cpu = MEMORY_PER_CPU_0 + 48;
    governors[0].settings.background = 1;
    governor_copy_settings(&governors[1], &governors[0]);
    CHECK_EQUAL(governors[1].settings.memory_per_cpu, MEMORY_PER_CPU_0 + 48);
    CHECK_EQUAL(governors[1].settings.background, 0); /* it has no helper */
    governors[0].settings.background = 0;
}

/* A block of the other allocator is no block of this one. */
static void test_misuse(void) {
    void *block = allocator_allocate(&allocators[1], 100);
    allocator_release(&allocators[0], block);
    CHECK_EQUAL(misuses[0], 1);
    CHECK_EQUAL(misuses[1], 0);
    allocator_release(&allocators[1], block);
    CHECK_EQUAL(misuses[1], 0);
}

static void test_threads(uint64_t seed) {
    for (size_t i = 0; i < THREADS; i++) {
        workers[i].random = (i + seed) * 2654435761U;
        CHECK(pthread_create(&workers[i].thread, NULL, work, &workers[i]) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_join(workers[i].thread, NULL) == 0);
    }
    CHECK(flushed > 0);
    for (size_t i = 0; i < THREADS * SLOTS; i++) {
        struct slot *slot = &workers[i / SLOTS].slots[i % SLOTS];
        if (slot->block != NULL) {
            put(slot);
        }
    }
    for (unsigned i = 0; i < ALLOCATORS; i++) {
        CHECK(flush(i) > 0);
        CHECK_EQUAL(heap_used_pages(&governors[i].heap), 0);
        CHECK_EQUAL(misuses[i], i == 0);
        heap_walk(&governors[i].heap, NULL, 0);
    }
}

int main(void) {
    uint64_t seed = check_seed(1);
    rounds = check_rounds(rounds);
    size_classes_fill(&classes, vm_page_size());
    start();
    test_apart();
    test_large();
    test_misuse();
    test_settings();
    test_threads(seed);
    return 0;
}
