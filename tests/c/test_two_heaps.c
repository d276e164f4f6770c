/*
 * Two allocators in one process, each a heap with CPU caches of its own, in CACHE_LOCKED: a block returns to
 * the heap that it came from, and what happens to one allocator leaves the other as it is.
 */
#include "cache/cpu_cache.h"
#include "heap_walk.h"

#include <pthread.h>

#define ALLOCATORS 2
#define THREADS    4
#define SLOTS      600

static struct allocator {
    struct lock lock; /* the heap's */
    struct heap heap;
    struct cpu_caches caches;
} allocators[ALLOCATORS] = {{.caches = CPU_CACHES_UNREADY}, {.caches = CPU_CACHES_UNREADY}};

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

static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

static void put_into_heap(void *context, void *const *blocks, size_t count) {
    struct allocator *allocator = context;
    lock_acquire(&allocator->lock);
    heap_put_blocks(&allocator->heap, blocks, count);
    lock_release(&allocator->lock);
}

static void put_magazine(struct allocator *allocator, uint32_t class, void *const *blocks, size_t count) {
    size_t pushed = count == 0 ? 0 : cpu_cache_push_some(&allocator->caches, class, blocks, count);
    if (pushed < count) {
        put_into_heap(allocator, blocks + pushed, count - pushed);
    }
}

static void *obtain(struct allocator *allocator, uint32_t class) {
    static const struct take_options options = {.new_slabs = RUN_FOR_ANY};
    void *blocks[MAX_MAGAZINE_BLOCKS];
    if (cpu_cache_pop_some(&allocator->caches, class, blocks, 1) == 1) {
        return blocks[0];
    }
    cpu_cache_open(&allocator->caches, class);
    lock_acquire(&allocator->lock);
    size_t count = heap_take_blocks(&allocator->heap, class, blocks, classes.of[class].batch, &options);
    lock_release(&allocator->lock);
    CHECK(count > 0);
    put_magazine(allocator, class, blocks, count - 1);
    return blocks[count - 1];
}

static size_t flush(struct allocator *allocator) {
    size_t count = 0;
    for (unsigned number = 0; number < allocator->caches.count; number++) {
        count += cpu_cache_flush(&allocator->caches, number, false, put_into_heap, allocator);
    }
    return count;
}

static size_t cached(const struct allocator *allocator) {
    size_t bytes;
    return cpu_caches_blocks(&allocator->caches, &bytes);
}

/* In the first word and the last. */
static uint64_t mark_of(const struct slot *slot) {
    return (uint64_t)(uintptr_t)slot->block * 31 + slot->allocator;
}

static void take(struct slot *slot, uint32_t class, unsigned allocator) {
    *slot = (struct slot){obtain(&allocators[allocator], class), class, allocator};
    CHECK_EQUAL(heap_class_at(&allocators[allocator].heap, slot->block), (int)class);
    CHECK_EQUAL(heap_class_at(&allocators[!allocator].heap, slot->block), -1);
    slot->block[0] = slot->block[classes.of[class].size / 8 - 1] = mark_of(slot);
}

static void put(struct slot *slot) {
    CHECK_EQUAL(slot->block[0], mark_of(slot));
    CHECK_EQUAL(slot->block[classes.of[slot->class].size / 8 - 1], mark_of(slot));
    void *block = slot->block;
    put_magazine(&allocators[slot->allocator], slot->class, &block, 1);
    slot->block = NULL;
}

static void *work(void *argument) {
    struct worker *worker = argument;
    for (size_t round = 0; round < rounds; round++) {
        struct slot *slot = &worker->slots[next_random(&worker->random) % SLOTS];
        if (slot->block != NULL) {
            put(slot);
        } else {
            take(slot, 1 + (uint32_t)(next_random(&worker->random) % (classes.count - 1)),
                 (unsigned)(next_random(&worker->random) % ALLOCATORS));
        }
        if (next_random(&worker->random) % 4096 == 0) {
            flushed += flush(&allocators[next_random(&worker->random) % ALLOCATORS]);
        }
    }
    return NULL;
}

static void start(void) {
    for (unsigned i = 0; i < ALLOCATORS; i++) {
        CHECK(heap_init(&allocators[i].heap, &classes, (size_t)1 << 36));
        CHECK(cpu_caches_init(&allocators[i].caches, &classes, (struct rseq_offsets){0}));
        cpu_caches_start(&allocators[i].caches, CACHE_LOCKED, true);
    }
}

static void test_apart(void) {
    struct slot slots[ALLOCATORS];
    void *block;
    take(&slots[0], 1, 0);
    CHECK_EQUAL(cached(&allocators[0]), classes.of[1].batch - 1U);
    CHECK_EQUAL(cached(&allocators[1]), 0);
    CHECK_EQUAL(cpu_cache_pop_some(&allocators[1].caches, 1, &block, 1), 0);
    CHECK_EQUAL(heap_used_pages(&allocators[1].heap), 0);
    take(&slots[1], 1, 1);
    put(&slots[0]);
    CHECK_EQUAL(flush(&allocators[0]), classes.of[1].batch);
    CHECK_EQUAL(heap_used_pages(&allocators[0].heap), 0);
    CHECK_EQUAL(cached(&allocators[1]), classes.of[1].batch - 1U);
    CHECK_EQUAL(allocators[0].caches.flushes, 1);
    CHECK_EQUAL(allocators[1].caches.flushes, 0);

    /* A block of the other heap is no block of this one. */
    block = slots[1].block;
    heap_put_blocks(&allocators[0].heap, &block, 1);
    CHECK_EQUAL(allocators[0].heap.misuses, 1);
    CHECK_EQUAL(allocators[0].heap.misuse[0].kind, MISUSE_INVALID_FREE);
    put(&slots[1]);
    CHECK_EQUAL(allocators[1].heap.misuses, 0);
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
        CHECK(flush(&allocators[i]) > 0);
        CHECK_EQUAL(heap_used_pages(&allocators[i].heap), 0);
        CHECK_EQUAL(allocators[i].heap.misuses, i == 0 ? 1 : 0);
        heap_walk(&allocators[i].heap, NULL, 0);
    }
}

int main(void) {
    uint64_t seed = check_seed(1);
    rounds = check_rounds(rounds);
    size_classes_fill(&classes, vm_page_size());
    start();
    test_apart();
    test_threads(seed);
    return 0;
}
