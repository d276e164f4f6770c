/* Several arenas: which one serves a thread, where blocks go, and what all of them hold together. */
#include "arena/select.h"

#include "arena/arena.h"
#include "arena/blocks.h"
#include "arena/check.h"
#include "arena/large.h"
#include "arena/limit.h"
#include "arena/purger.h"
#include "arena/terms.h"
#include "heap/walk.h"
#include "os/vm.h"

#include "check.h"
#include "pages.h"
#include "test_clock.h"

#include <string.h>
#include <sys/resource.h>

/* Sanitizers need more address space than any limit leaves them. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define LIMITS_WORK 0
#else
#define LIMITS_WORK 1
#endif

enum { ARENAS = 4, MAGAZINE = 16, SLOTS = 400 };

static struct size_classes classes;
static struct cpu_caches caches;
static struct arenas arenas;
static size_t page_size;
static uint64_t random_state;
static unsigned cpu; /* that the caller seems to run on */
static size_t misuses;

unsigned __wrap_cpu_cache_place(const struct cpu_caches *of);

unsigned __wrap_cpu_cache_place(const struct cpu_caches *of) {
    (void)of;
    return cpu;
}

static unsigned node;

unsigned __wrap_cpu_cache_node(const struct cpu_caches *of);

unsigned __wrap_cpu_cache_node(const struct cpu_caches *of) {
    (void)of;
    return node;
}

static void misused(const struct misuse_record *misuse) {
    (void)misuse;
    misuses++;
}

/* Starts with this number of arenas in use. There is address space for ARENAS. */
static void start(unsigned active) {
    clock_stop(); /* no epoch ends */
    page_size = vm_page_size();
    size_classes_fill(&classes, page_size);
    cpu_caches_init(&caches, &classes, (struct rseq_offsets){0});
    cpu_caches_start(&caches, CACHE_OFF);
    arenas.settings.heaps = HEAPS_0 + ARENAS;
    CHECK(arena_init(&arenas, &classes, &caches, HEAP_SPACE_BYTES, false, misused));
    arenas.settings.heaps = HEAPS_AUTO; /* from here on the CPU's number decides */
    arenas.active = active;
}

static unsigned number_of(const void *block) {
    return (unsigned)(arena_of(&arenas, block) - arenas.of);
}

static void *take_large(unsigned by, size_t bytes) {
    bool zero;
    cpu = by;
    void *block = arena_take_large(&arenas, bytes / page_size, 1, false, &zero);
    CHECK(block != NULL);
    return block;
}

static void *take_small(unsigned by, uint32_t size_class) {
    void *block;
    cpu = by;
    CHECK_EQUAL(arena_take_blocks(&arenas, size_class, &block, 1), 1);
    memset(block, 1, classes.of[size_class].size);
    return block;
}

static void walk_all(void) {
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(&arenas, &number)) != NULL;) {
        heap_walk(&arena->heap, NULL, 0);
    }
}

/* What the heaps hold in truth. */
static size_t sum_of(size_t (*pages)(const struct heap *)) {
    size_t sum = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(&arenas, &number)) != NULL;) {
        sum += pages(&arena->heap);
    }
    return sum;
}

static size_t distance(size_t a, size_t b) {
    return a > b ? a - b : b - a;
}

static void report(void) {
    purger_enter(&arenas);
    report_all(&arenas);
    purger_leave(&arenas);
}

static void check_totals(void) {
    size_t error = report_error(&arenas);
    size_t used = sum_of(heap_used_pages);
    size_t dirty = sum_of(heap_dirty_pages);
    CHECK(distance(used_pages(&arenas) + dirty_pages(&arenas), used + dirty) <= error);
    CHECK(used <= used_pages(&arenas) + error);
    struct retention_terms terms = terms_now(&arenas);
    CHECK(dirty <= limit_by(&arenas, &terms, (struct levels){used, dirty}).max);
}

static void test_each_cpu_has_its_own(void) {
    start(ARENAS);
    CHECK_EQUAL(arenas.started, 1);
    for (unsigned i = 0; i < 2 * ARENAS; i++) {
        CHECK_EQUAL(number_of(take_large(i, 64 * page_size)), i % ARENAS);
        CHECK_EQUAL(number_of(take_small(i, 1)), i % ARENAS);
    }
    CHECK_EQUAL(arenas.started, ARENAS);
    walk_all();
}

static uint64_t locks_in_all(void) {
    uint64_t locks = 0;
    unsigned number = 0;
    for (const struct arena *arena; (arena = arena_next(&arenas, &number)) != NULL;) {
        locks += arena->heap_locks;
    }
    return locks;
}

/* A call that the caches do not serve takes one heap's lock, once. */
static void test_one_lock(void) {
    enum { EACH = 2 * ARENAS };
    start(ARENAS);
    void *small[EACH];
    void *large[EACH];
    take_large(0, 64 << 20); /* so that much may stay free */
    for (unsigned i = 0; i < EACH; i++) {
        uint64_t locks = locks_in_all();
        small[i] = take_small(i, 5);
        CHECK_EQUAL(locks_in_all(), locks + 1);
        large[i] = take_large(i, 64 * page_size);
        CHECK_EQUAL(locks_in_all(), locks + 2);
    }
    for (unsigned i = 0; i < EACH; i++) {
        uint64_t locks = locks_in_all();
        cpu = i + 1; /* that of another arena */
        arena_put_blocks(&arenas, 5, &small[i], 1);
        CHECK_EQUAL(locks_in_all(), locks + 1);
        arena_put_large(&arenas, large[i]);
        CHECK_EQUAL(locks_in_all(), locks + 2);
    }
}

static void test_one_at_first(void) {
    start(1);
    for (unsigned i = 0; i < 2 * ARENAS; i++) {
        CHECK_EQUAL(number_of(take_large(i, 64 * page_size)), 0);
    }
    CHECK_EQUAL(arenas.started, 1);
    CHECK_EQUAL(arenas.limit.batch, 0);
    /* The others hold no memory: no whole page of theirs was touched. */
    char *first = (char *)vm_round_up((uintptr_t)&arenas.of[1]);
    char *end = (char *)((uintptr_t)&arenas.of[ARENAS + 1] & ~(page_size - 1));
    CHECK(!residency_is_told() || resident_pages(first, (size_t)(end - first)) == 0);
}

/* One magazine with blocks of all arenas, in no order. */
static void test_blocks_go_home(void) {
    start(ARENAS);
    void *blocks[MAGAZINE];
    for (unsigned i = 0; i < MAGAZINE; i++) {
        blocks[i] = take_small(i * 7 / 3, 5);
    }
    cpu = 2;
    arena_put_blocks(&arenas, 5, blocks, MAGAZINE);
    CHECK_EQUAL(sum_of(heap_used_pages), 0);
    for (unsigned i = 0; i < ARENAS; i++) {
        CHECK_EQUAL(arenas.of[i].heap.misuses, 0);
    }
    walk_all();
    /* Again: each is named, by the arena that it belongs to. */
    arena_put_blocks(&arenas, 5, blocks, MAGAZINE);
    CHECK_EQUAL(misuses, MAGAZINE);
}

/* Threads wait for the lock, and then take it. */
static void contend(unsigned number, unsigned waits) {
    arenas.of[number].contended += waits;
    heap_lock(&arenas.of[number]);
    heap_unlock_and_check(&arenas, &arenas.of[number]);
}

/* As on a machine of two nodes, each with a depot. */
static void start_with_nodes(void) {
    start(ARENAS);
    arenas.nodes = 2;
    arenas.depots_per_node = 1;
    arenas.depot_count = 2;
    for (unsigned i = 0; i < 2; i++) {
        CHECK(depot_init(&arenas.depots[i], &classes, 256, 1 << 20, 1 << 20, 1 << 20));
    }
}

static size_t in_depot(unsigned of_node) {
    size_t bytes;
    return depot_blocks(&arenas.depots[of_node], &bytes);
}

/* A node's CPUs use its own arenas, and what they free of another node's goes home. */
static void test_nodes(void) {
    start_with_nodes();
    void *blocks[MAGAZINE];
    for (unsigned i = 0; i < MAGAZINE; i++) {
        node = i % 2;
        blocks[i] = take_small(i / 2, 5);
        CHECK_EQUAL(number_of(blocks[i]) % 2, node);
        CHECK_EQUAL(arena_node(&arenas, arena_of(&arenas, blocks[i])), node);
    }
    node = 0;
    arena_put_blocks(&arenas, 5, blocks, MAGAZINE);
    CHECK_EQUAL(in_depot(0), MAGAZINE / 2);
    CHECK_EQUAL(in_depot(1), MAGAZINE / 2);
    for (node = 0; node < 2; node++) {
        CHECK_EQUAL(arena_take_blocks(&arenas, 5, blocks, MAGAZINE), MAGAZINE / 2);
        for (unsigned i = 0; i < MAGAZINE / 2; i++) {
            CHECK_EQUAL(arena_node(&arenas, arena_of(&arenas, blocks[i])), node);
        }
    }
    /* With fewer arenas than nodes there is no home. */
    arenas.active = 1;
    node = 1;
    void *block = take_small(3, 7);
    CHECK_EQUAL(number_of(block), 0);
    arena_put_blocks(&arenas, 7, &block, 1);
    CHECK_EQUAL(in_depot(1), 1);
    contend(0, 100); /* the first step is to an arena for each node */
    CHECK_EQUAL(arenas.active, 2);
}

/* The order of the blocks that stay, and of those that move, does not change. */
static void test_gathering(void) {
    start(ARENAS);
    void *of[ARENAS][2];
    for (unsigned i = 0; i < ARENAS; i++) {
        of[i][0] = take_small(i, 3);
        of[i][1] = take_small(i, 3);
    }
    void *blocks[] = {of[1][0], of[0][0], of[2][0], of[0][1], of[1][1], of[3][0], of[1][0]};
    void *expected[] = {of[0][0], of[2][0], of[0][1], of[3][0], of[1][0], of[1][1], of[1][0]};
    CHECK_EQUAL(arena_gather(&arenas, blocks, 7), 3);
    CHECK(memcmp(blocks, expected, sizeof blocks) == 0);
    CHECK_EQUAL(arena_gather(&arenas, blocks, 4), 1);
    CHECK_EQUAL(arena_gather(&arenas, blocks, 1), 1);
}

/* An arena without free memory gets some of its own while all together may grow. Then it takes from one that
 * has some. */
static void test_memory_of_others(void) {
    start(ARENAS);
    terms_start_background(&arenas);
    for (unsigned i = 1; i < ARENAS; i++) {
        CHECK_EQUAL(number_of(take_large(i, OWN_BYTES)), i);
    }
    char *large = take_large(0, 8 << 20);
    memset(large, 1, 8 << 20);
    arena_put_large(&arenas, large);
    size_t dirty = sum_of(heap_dirty_pages);
    CHECK(dirty >= ((size_t)8 << 20) / page_size);
    size_t room = limit_for(&arenas, totals_now(&arenas)).max - dirty;
    size_t grown = 0;
    for (; !takes_from_others(&arenas, &arenas.of[1], 8); grown += 8) {
        CHECK_EQUAL(number_of(take_large(1, 8 * page_size)), 1);
        CHECK(grown < room);
    }
    CHECK(grown > 0);
    CHECK_EQUAL(number_of(take_large(1, 1 << 19)), 0);
    CHECK_EQUAL(sum_of(heap_dirty_pages), dirty - ((size_t)1 << 19) / page_size);
    CHECK_EQUAL(number_of(take_small(2, 9)), 0); /* a slab of dirty pages */
    CHECK_EQUAL(number_of(take_small(2, 9)), 0); /* the slab has free blocks */
    /* What no arena has comes from its own. */
    CHECK_EQUAL(number_of(take_large(3, 16 << 20)), 3);
    walk_all();
}

/* Where only the pages held matter, an arena does not report what becomes free. Then blocks that a thread
 * takes and frees write no word of all arenas. */
static void check_reports(bool lags) {
    start(ARENAS);
    terms_start_background(&arenas);
    arenas.limit.terms.available_bytes = lags ? SIZE_MAX : 1 << 20;
    char *blocks[] = {take_large(0, 1 << 20), take_large(1, 1 << 20)};
    report();
    CHECK_EQUAL(arenas.limit.batch > 0, lags);
    uint64_t totals = arenas.limit.totals;
    arena_put_large(&arenas, blocks[0]);
    CHECK_EQUAL(arenas.limit.totals == totals, lags);
    CHECK_EQUAL(number_of(take_large(0, 1 << 20)), 0);
    check_totals();
    arena_put_large(&arenas, blocks[1]);
    report();
    CHECK_EQUAL(dirty_pages(&arenas), sum_of(heap_dirty_pages));
    check_totals();
}

static void test_lagging_reports(void) {
    check_reports(true);
}

static void test_exact_reports(void) {
    check_reports(false);
}

/* Two arenas use memory one after the other. One that does not report what becomes free does not raise the
 * peak of both, but for OWN_BYTES of each. */
static void test_peak_of_one_time(void) {
    start(ARENAS);
    terms_start_background(&arenas);
    char *block = take_large(0, 8 << 20);
    take_large(1, 1 << 20);
    report();
    CHECK(arenas.limit.batch > 0);
    arena_put_large(&arenas, block);
    CHECK_EQUAL(number_of(take_large(1, 9 << 20)), 1);
    CHECK_EQUAL(arenas.limit.max_used, (12 << 20) / page_size);
    CHECK_EQUAL(arenas.limit.terms.peak_bytes, 12 << 20);
    check_totals();
}

/* Within an epoch, the memory that is available comes to limit what is free. Each change is reported from
 * then on. */
static void test_another_form(void) {
    start(ARENAS);
    terms_start_background(&arenas);
    arenas.limit.terms.available_bytes = 60 << 20;
    char *blocks[] = {take_large(0, 1 << 20), take_large(1, 1 << 20)};
    report();
    CHECK(arenas.limit.batch > 0);
    arena_put_large(&arenas, blocks[0]);
    blocks[0] = take_large(1, 32 << 20);
    CHECK_EQUAL(arenas.limit.batch, 0);
    CHECK_EQUAL(dirty_pages(&arenas), sum_of(heap_dirty_pages));
    for (unsigned i = 0; i < 2; i++) {
        arena_put_large(&arenas, blocks[i]);
        CHECK_EQUAL(dirty_pages(&arenas), sum_of(heap_dirty_pages));
        check_totals();
    }
}

/* Without a background purge each change is reported, too. */
static void test_the_background_ends(void) {
    start(ARENAS);
    terms_start_background(&arenas);
    char *blocks[] = {take_large(0, 1 << 20), take_large(1, 1 << 20)};
    report();
    arena_put_large(&arenas, blocks[0]);
    CHECK(dirty_pages(&arenas) < sum_of(heap_dirty_pages));
    terms_stop_background(&arenas);
    CHECK_EQUAL(arenas.limit.batch, 0);
    CHECK_EQUAL(dirty_pages(&arenas), sum_of(heap_dirty_pages));
}

static void test_growth(void) {
    start(1);
    contend(0, 3);
    CHECK_EQUAL(arenas.active, 1);
    contend(0, 1);
    CHECK_EQUAL(arenas.active, 2);
    /* Few waits among many acquisitions. */
    for (unsigned i = 0; i < 10; i++) {
        contend(0, 3);
        for (unsigned locks = 0; locks < 1024; locks++) {
            contend(0, 0);
        }
    }
    CHECK_EQUAL(arenas.active, 2);
    contend(0, 4);
    CHECK_EQUAL(arenas.active, ARENAS);
    contend(0, 1000);
    CHECK_EQUAL(arenas.active, ARENAS);
    CHECK_EQUAL(arenas.started, 1); /* the others start when they are needed */
}

/* As many as the CPUs in use, and as there is address space for. */
static void test_most(void) {
    start(1);
    arena_set_max(&arenas, 0.3);
    CHECK_EQUAL(arenas.max_active, 1);
    contend(0, 100);
    CHECK_EQUAL(arenas.active, 1);
    arena_set_max(&arenas, 2);
    CHECK_EQUAL(arenas.max_active, 1);
    arena_set_max(&arenas, 2.7);
    CHECK_EQUAL(arenas.max_active, 4);
    arena_set_max(&arenas, 1000);
    CHECK_EQUAL(arenas.max_active, ARENAS);
}

static struct {
    void *block;
    uint32_t size_class; /* 0: large */
} slots[SLOTS];

static void test_totals(void) {
    start(ARENAS);
    for (size_t i = 0; i < check_rounds(20000); i++) {
        size_t at = check_random(&random_state) % SLOTS;
        cpu = (unsigned)(check_random(&random_state) % ARENAS);
        if (slots[at].block == NULL) {
            uint64_t dice = check_random(&random_state);
            slots[at].size_class = dice % 4 == 0 ? 0 : 1 + (uint32_t)(dice / 4 % (classes.count - 1));
            slots[at].block = slots[at].size_class == 0 ? take_large(cpu, (1 + dice / 4 % 200) * page_size)
                                                        : take_small(cpu, slots[at].size_class);
        } else if (slots[at].size_class == 0) {
            arena_put_large(&arenas, slots[at].block);
            slots[at].block = NULL;
        } else {
            arena_put_blocks(&arenas, slots[at].size_class, &slots[at].block, 1);
            slots[at].block = NULL;
        }
        check_totals();
    }
    walk_all();
    report();
    CHECK_EQUAL(used_pages(&arenas), sum_of(heap_used_pages));
    CHECK_EQUAL(dirty_pages(&arenas), sum_of(heap_dirty_pages));
    for (size_t at = 0; at < SLOTS; at++) {
        if (slots[at].block != NULL && slots[at].size_class == 0) {
            arena_put_large(&arenas, slots[at].block);
        } else if (slots[at].block != NULL) {
            arena_put_blocks(&arenas, slots[at].size_class, &slots[at].block, 1);
        }
    }
    CHECK_EQUAL(sum_of(heap_used_pages), 0);
    arena_trim(&arenas, 0);
    CHECK_EQUAL(sum_of(heap_dirty_pages), 0);
    CHECK_EQUAL(misuses, 0);
}

static void free_run(unsigned by, size_t pages) {
    arena_put_large(&arenas, take_large(by, pages * page_size));
}

/* One call purges the coldest runs, whatever arena they are in. */
static void test_the_coldest_of_all(void) {
    start(ARENAS);
    for (unsigned i = 0; i < ARENAS; i++) {
        CHECK(arena_start(&arenas, i));
    }
    take_large(0, 64 << 20); /* so that much may stay free */
    static const unsigned order[ARENAS] = {2, 0, 3, 1};
    for (unsigned age = 0; age < ARENAS; age++) {
        free_run(order[age], 20 + age); /* no other arena has a run that long */
        for (unsigned i = 0; i < ARENAS; i++) {
            arenas.of[i].heap.runs.now++;
        }
    }
    CHECK_EQUAL(sum_of(heap_dirty_pages), 20 + 21 + 22 + 23);
    uint64_t purges = arenas.counts.vectored_calls + arenas.counts.single_calls;
    purger_enter(&arenas);
    CHECK_EQUAL(purge_down(&arenas, 23 + 10, 0, REASON_ASKED), 20 + 21 + 12);
    purger_leave(&arenas);
    CHECK_EQUAL(heap_dirty_pages(&arenas.of[2].heap), 0);
    CHECK_EQUAL(heap_dirty_pages(&arenas.of[0].heap), 0);
    CHECK_EQUAL(heap_dirty_pages(&arenas.of[3].heap), 10);
    CHECK_EQUAL(heap_dirty_pages(&arenas.of[1].heap), 23);
    CHECK(arenas.counts.vectored_calls == 0 ||
          arenas.counts.vectored_calls + arenas.counts.single_calls == purges + 1);
    walk_all();
}

/* A block that no part has room for. */
static void test_beyond_the_parts(void) {
    start(ARENAS);
    size_t part = (size_t)1 << arenas.map.part_shift;
    bool zero;
    cpu = 1;
    char *block = arena_take_large(&arenas, part / page_size, 1, false, &zero);
    if (block == NULL) {
        return; /* the machine does not overcommit */
    }
    CHECK_EQUAL(number_of(block), ARENAS);
    block[0] = block[part - 1] = 1;
    arena_put_large(&arenas, block);
    CHECK_EQUAL(heap_used_pages(&arenas.of[ARENAS].heap), 0);
    CHECK_EQUAL(arenas.of[ARENAS].heap.misuses, 0);
    walk_all();
}

/* After a limit on address space the arenas in use go on, and no other starts. */
static void test_limited(void) {
    start(2);
    char *kept[2] = {take_large(0, 1 << 20), take_large(1, 1 << 20)};
    arena_limit_space(&arenas, (size_t)1 << 30);
    arenas.active = ARENAS;
    CHECK(arenas.map.quanta << SPACE_QUANTUM_SHIFT == (size_t)2 << arenas.map.part_shift);
    CHECK_EQUAL(number_of(take_large(2, 64 * page_size)), 0);
    CHECK_EQUAL(arenas.states[2], ARENA_FAILED);
    /* More than the first arena had made usable. */
    char *more = take_large(0, 100 << 20);
    CHECK_EQUAL(number_of(more), ARENAS);
    more[0] = 1;
    arena_put_large(&arenas, more);
    for (int i = 0; i < 2; i++) {
        memset(kept[i], 1, 1 << 20);
        CHECK_EQUAL(number_of(kept[i]), i);
        arena_put_large(&arenas, kept[i]);
    }
    CHECK_EQUAL(misuses, 0);
    walk_all();
}

/* No room for the metadata of another heap: the first one serves. */
static void test_failed_start(void) {
    start(ARENAS);
    take_small(0, 1);
    struct rlimit none = {1, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &none) == 0);
    for (unsigned i = 1; i < ARENAS; i++) {
        CHECK_EQUAL(number_of(take_small(i, 1)), 0);
        CHECK_EQUAL(arenas.states[i], ARENA_FAILED);
    }
    CHECK_EQUAL(arenas.started, 1);
}

/* With a limit from the start there is one arena. */
static void test_limited_from_the_start(void) {
    struct rlimit some = {(rlim_t)4 << 30, RLIM_INFINITY};
    CHECK(setrlimit(RLIMIT_AS, &some) == 0);
    start(1);
    CHECK_EQUAL(arenas.map.parts, 0);
    CHECK_EQUAL(arenas.max_active, 1);
    contend(0, 100);
    CHECK_EQUAL(number_of(take_large(3, 64 * page_size)), 0);
}

int main(void) {
    random_state = check_seed(88172645463325252U);
    in_child(test_each_cpu_has_its_own);
    in_child(test_one_lock);
    in_child(test_one_at_first);
    in_child(test_blocks_go_home);
    in_child(test_nodes);
    in_child(test_gathering);
    in_child(test_memory_of_others);
    in_child(test_lagging_reports);
    in_child(test_exact_reports);
    in_child(test_peak_of_one_time);
    in_child(test_another_form);
    in_child(test_the_background_ends);
    in_child(test_growth);
    in_child(test_most);
    in_child(test_totals);
    in_child(test_the_coldest_of_all);
    in_child(test_beyond_the_parts);
    if (LIMITS_WORK) {
        in_child(test_limited);
        in_child(test_failed_start);
        in_child(test_limited_from_the_start);
    }
    return 0;
}
