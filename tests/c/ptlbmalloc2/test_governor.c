/*
 * The governor on glibc's arenas, under other names, so that sanitizers can check it: threads allocate at
 * random, exchange blocks, start and end, while the process forks.
 */
#include "activation.h"
#include "arena.h"
#include "os/residency.h"
#include "state.h"

#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "check.h"
#include "counter_reader.h"

#if defined(__GLIBC__) && !__GLIBC_PREREQ(2, 33)
#define mallinfo2 mallinfo /* whose numbers are of 32 bits: enough here */
#endif

void *governed_malloc(size_t bytes);
void *governed_calloc(size_t count, size_t bytes);
void *governed_realloc(void *block, size_t bytes);
void *governed_reallocarray(void *block, size_t count, size_t bytes);
void governed_free(void *block);

#ifdef __has_feature
#define HAS_FEATURE(feature) __has_feature(feature)
#else
#define HAS_FEATURE(feature) 0
#endif
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__) || HAS_FEATURE(thread_sanitizer) || \
    HAS_FEATURE(address_sanitizer)
#define SANITIZED 1
#else
#define SANITIZED 0
#endif

#define THREADS        4
#define MAX_BYTES      (200UL << 10)
#define BLOCKS         600 /* of each thread: 60 MB on average */
#define EXCHANGE_SLOTS 64
#define FORKS          20
#define WAVES          80   /* of all threads */
#define TALL_BLOCKS    1200 /* of 100 KB: nearly two heaps */
#define TALL_BYTES     100000

static const struct counters *const counters = &state.counters;
static _Atomic(int) stop;
static _Atomic(unsigned) waves;
static uint64_t seed;

/*
 * What a block holds is checked at both ends and once a page. Not under ThreadSanitizer's eyes: that a block
 * passes from one thread to another inside glibc is glibc's affair.
 */
struct block {
    unsigned char *start;
    size_t bytes;
    unsigned char mark;
};

#define UNWATCHED __attribute__((noinline, no_sanitize("thread")))

UNWATCHED static void write_marks(const struct block *block, size_t from) {
    volatile unsigned char *bytes = block->start;
    for (size_t i = from; i < block->bytes; i += 1024) {
        bytes[i] = block->mark;
    }
    bytes[block->bytes - 1] = block->mark;
}

UNWATCHED static void check_marks(const struct block *block, size_t up_to) {
    const volatile unsigned char *bytes = block->start;
    for (size_t i = 0; i < up_to; i += 1024) {
        CHECK_EQUAL(bytes[i], block->mark);
    }
}

UNWATCHED static void check_zero(const struct block *block) {
    const volatile unsigned char *bytes = block->start;
    for (size_t i = 0; i < block->bytes; i++) {
        CHECK(bytes[i] == 0);
    }
}

UNWATCHED static unsigned char last_byte(const struct block *block) {
    return ((const volatile unsigned char *)block->start)[block->bytes - 1];
}

static void release(struct block *block) {
    if (block->start != NULL) {
        check_marks(block, block->bytes);
        CHECK_EQUAL(last_byte(block), block->mark);
        governed_free(block->start);
        block->start = NULL;
    }
}

/* Mostly small, sometimes up to the most. */
static size_t random_bytes(uint64_t *random) {
    unsigned kind = check_random(random) % 4;
    size_t most = kind == 0 ? 256 : kind == 1 ? 8192 : MAX_BYTES;
    return 16 + check_random(random) % (most - 15);
}

static void obtain(struct block *block, uint64_t *random) {
    block->bytes = random_bytes(random);
    block->mark = (unsigned char)(check_random(random) | 1);
    if (check_random(random) % 8 == 0) {
        block->start = governed_calloc(block->bytes, 1);
        CHECK(block->start != NULL);
        check_zero(block);
    } else {
        block->start = governed_malloc(block->bytes);
        CHECK(block->start != NULL);
    }
    write_marks(block, 0);
}

static void resize(struct block *block, uint64_t *random) {
    size_t bytes = random_bytes(random);
    unsigned char *moved = check_random(random) % 2 == 0 ? governed_realloc(block->start, bytes)
                                                         : governed_reallocarray(block->start, bytes, 1);
    CHECK(moved != NULL);
    size_t kept = bytes < block->bytes ? bytes : block->bytes;
    block->start = moved;
    check_marks(block, kept);
    block->bytes = bytes;
    write_marks(block, 0);
}

/* Where threads leave blocks to each other. */
static struct {
    pthread_mutex_t mutex;
    struct block block;
} exchange[EXCHANGE_SLOTS];

static void hand_over(struct block *block, uint64_t *random) {
    size_t slot = check_random(random) % EXCHANGE_SLOTS;
    CHECK(pthread_mutex_lock(&exchange[slot].mutex) == 0);
    struct block other = exchange[slot].block;
    exchange[slot].block = *block;
    CHECK(pthread_mutex_unlock(&exchange[slot].mutex) == 0);
    *block = other;
}

static void work_at_random(struct block *blocks, uint64_t *random, unsigned steps) {
    for (unsigned i = 0; i < steps; i++) {
        struct block *block = &blocks[check_random(random) % BLOCKS];
        if (block->start == NULL) {
            obtain(block, random);
        } else if (check_random(random) % 4 == 0) {
            resize(block, random);
        } else if (check_random(random) % 4 == 0) {
            hand_over(block, random);
        } else {
            release(block);
        }
    }
}

/* Fills and empties in waves, so that tops come free by tens of megabytes. */
static void *run_random(void *argument) {
    uint64_t random = (uintptr_t)argument;
    static __thread struct block blocks[BLOCKS];
    while (!atomic_load(&stop)) {
        work_at_random(blocks, &random, 2000);
        for (size_t i = 0; i < BLOCKS; i++) {
            release(&blocks[i]);
        }
        atomic_fetch_add(&waves, 1);
    }
    return NULL;
}

/* More than one heap in one arena, emptied from either end. */
static void *run_tall(void *unused) {
    (void)unused;
    static struct block tall[TALL_BLOCKS];
    for (unsigned round = 0; !atomic_load(&stop) || round < 2; round++) {
        for (size_t i = 0; i < TALL_BLOCKS; i++) {
            tall[i] = (struct block){governed_malloc(TALL_BYTES), TALL_BYTES, (unsigned char)(i | 1)};
            CHECK(tall[i].start != NULL);
            write_marks(&tall[i], 0);
        }
        for (size_t i = 0; i < TALL_BLOCKS; i++) {
            release(&tall[round % 2 == 0 ? TALL_BLOCKS - 1 - i : i]);
        }
    }
    return NULL;
}

static void *run_briefly(void *argument) {
    uint64_t random = (uintptr_t)argument;
    struct block block = {0};
    for (int i = 0; i < 20; i++) {
        obtain(&block, &random);
        hand_over(&block, &random);
        release(&block);
    }
    return NULL;
}

static void *run_churn(void *unused) {
    (void)unused;
    for (uintptr_t i = 1; !atomic_load(&stop); i++) {
        pthread_t brief;
        CHECK(pthread_create(&brief, NULL, run_briefly, (void *)(i * 2654435761U | 1)) == 0);
        CHECK(pthread_join(brief, NULL) == 0);
    }
    return NULL;
}

/* What a process outside would read; with no other thread at work. */
static void check_counters(void) {
    const struct counter_table *table = counter_table_of("ptlbmalloc2");
    CHECK_EQUAL(counter_now(table, "state"), activation_is_on() ? 1 : 2);
#define SAME(name) CHECK_EQUAL(counter_now(table, #name), counters->name)
    SAME(threshold_bytes);
    SAME(pad_each_bytes);
    SAME(footprint_bytes);
    SAME(free_top_bytes);
    SAME(arenas);
    SAME(cpus_hundredths);
    SAME(trims);
    SAME(bytes_trimmed);
    SAME(bytes_purged);
    SAME(ranges);
    SAME(process_madvise_calls);
    SAME(madvise_calls);
    SAME(break_calls);
    SAME(failed_purges);
    SAME(busy_arenas);
    SAME(walks);
    SAME(claims);
    SAME(bytes_claimed);
    SAME(threshold_changes);
    SAME(mmap_threshold_raises);
#undef SAME
}

static void live_as_child(void) {
    static void *blocks[400];
    CHECK(activation_is_on());
    CHECK_EQUAL(counters->trims, 0);
    CHECK_EQUAL(counters->arenas, 0);
    check_counters();
    for (size_t i = 0; i < 400; i++) {
        blocks[i] = governed_malloc(100000);
        CHECK(blocks[i] != NULL);
        *(volatile char *)blocks[i] = 1;
    }
    for (size_t i = 0; i < 400; i++) {
        governed_free(blocks[i]);
    }
    CHECK(activation_is_on() && counters->walks > 0 && counters->arenas > 0 && counters->failed_purges == 0);
}

/* From GCC 13 on, TSan's fork holds TSan's runtime while glibc's waits for each arena, and who has the arena
 * waits for the runtime. */
#if defined(__SANITIZE_THREAD__) && __GNUC__ >= 13
#define CAN_FORK false
#else
#define CAN_FORK true
#endif

static void *run_forks(void *unused) {
    (void)unused;
    for (unsigned i = 0; CAN_FORK && (i < FORKS || !atomic_load(&stop)); i++) {
        /* On Linux there are half as many forks as waves. In gVisor each takes long, and takes all pages from
         * the other threads. */
        while (i >= FORKS + atomic_load(&waves) && !atomic_load(&stop)) {
            check_nap(20000000);
        }
        in_child(live_as_child);
        check_nap(20000000);
    }
    return NULL;
}

static bool has_done_enough(void) {
    return waves >= check_rounds(WAVES) && counters->trims >= 5 && counters->bytes_purged > 0;
}

static void stress(void) {
    pthread_t threads[THREADS + 3];
    for (size_t i = 0; i < EXCHANGE_SLOTS; i++) {
        CHECK(pthread_mutex_init(&exchange[i].mutex, NULL) == 0);
    }
    for (size_t i = 0; i < THREADS; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_random, (void *)(uintptr_t)((i + seed) * 7919)) == 0);
    }
    CHECK(pthread_create(&threads[THREADS], NULL, run_tall, NULL) == 0);
    CHECK(pthread_create(&threads[THREADS + 1], NULL, run_churn, NULL) == 0);
    CHECK(pthread_create(&threads[THREADS + 2], NULL, run_forks, NULL) == 0);
    WAIT_UNTIL(has_done_enough());
    atomic_store(&stop, 1);
    for (size_t i = 0; i < THREADS + 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    for (size_t i = 0; i < EXCHANGE_SLOTS; i++) {
        release(&exchange[i].block);
    }
}

/*
 * Allocates until the threshold has moved so far that all arenas are walked: what the governor then knows is
 * of this very instant.
 */
static void compare_with_mallinfo(void) {
    static void *blocks[20000];
    size_t count = 0;
    size_t walks = counters->walks;
    while (counters->walks == walks) {
        CHECK(count < sizeof blocks / sizeof blocks[0]);
        blocks[count] = governed_malloc(100000);
        CHECK(blocks[count] != NULL);
        count++;
    }
    struct mallinfo2 info = mallinfo2();
    CHECK_EQUAL(counters->footprint_bytes, info.arena);
    CHECK(counters->free_top_bytes >= info.keepcost);
    CHECK(counters->free_top_bytes <= info.fordblks);
    while (count > 0) {
        governed_free(blocks[--count]);
    }
}

static size_t number_after(const char *text, const char *name) {
    const char *at = strstr(text, name);
    CHECK(at != NULL);
    return strtoull(at + strlen(name), NULL, 10);
}

/* glibc's own report: well-formed, each arena's figure, and the total at the end of it. */
static void check_malloc_info(void) {
    char *text = NULL;
    size_t bytes = 0;
    FILE *stream = open_memstream(&text, &bytes);
    CHECK(stream != NULL);
    /* The buffer must not grow while glibc adds up. */
    for (int i = 0; i < 100000; i++) {
        fputc(' ', stream);
    }
    CHECK(fseek(stream, 0, SEEK_SET) == 0);
    CHECK(malloc_info(0, stream) == 0);
    CHECK(fputc('\0', stream) == '\0' && fclose(stream) == 0);

    static const char current[] = "<system type=\"current\" size=\"";
    size_t sum = 0;
    size_t heaps = 0;
    const char *heap = text;
    while ((heap = strstr(heap, "<heap nr=\"")) != NULL) {
        const char *end = strstr(heap, "</heap>");
        CHECK(end != NULL);
        sum += number_after(heap, current);
        heaps++;
        heap = end;
    }
    CHECK_EQUAL(heaps, counters->arenas);
    const char *total = text;
    for (const char *at = text; (at = strstr(at, "</heap>")) != NULL; at++) {
        total = at;
    }
    CHECK_EQUAL(number_after(total, current), sum);
    CHECK_EQUAL(mallinfo2().arena, sum);
    free(text);
}

static size_t process_resident_bytes(void) {
    FILE *stream = fopen("/proc/self/statm", "re");
    CHECK(stream != NULL);
    size_t size;
    size_t resident;
    CHECK(fscanf(stream, "%zu %zu", &size, &resident) == 2);
    CHECK(fclose(stream) == 0);
    return resident * (size_t)sysconf(_SC_PAGESIZE);
}

struct tops {
    size_t free_bytes, resident_bytes;
};

/* As they are now, whatever the governor has noted. Only while no other thread runs. */
static struct tops measure_tops(void) {
    static unsigned char scratch[RESIDENCY_CHUNK_PAGES];
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    struct tops tops = {0};
    for (struct arena *arena = glibc_main_arena; arena != NULL; arena = arena_after(arena)) {
        size_t bytes = arena_top_bytes(arena);
        size_t pages = bytes & ~(page_bytes - 1);
        tops.free_bytes += bytes;
        tops.resident_bytes +=
            residency_of_tail(arena_top_end(arena) - pages, pages, SIZE_MAX, scratch).resident_bytes;
    }
    return tops;
}

static pthread_barrier_t settling;

static void *run_settle(void *unused) {
    (void)unused;
    void *blocks[16];
    pthread_barrier_wait(&settling);
    for (size_t i = 0; i < 16; i++) {
        blocks[i] = governed_malloc(TALL_BYTES);
        CHECK(blocks[i] != NULL);
    }
    pthread_barrier_wait(&settling);
    for (size_t i = 16; i > 0; i--) {
        governed_free(blocks[i - 1]);
    }
    pthread_barrier_wait(&settling);
    return NULL;
}

/*
 * Each arena is used once more, by a thread of its own. A thread that ends leaves its cache to glibc, which
 * frees it unseen by the library: should that merge with a top, the arena's next check finds it.
 */
static void settle(void) {
    pthread_t threads[64];
    size_t count = counters->arenas;
    CHECK(count <= 64);
    CHECK(pthread_barrier_init(&settling, NULL, (unsigned)count) == 0);
    for (size_t i = 0; i < count; i++) {
        CHECK(pthread_create(&threads[i], NULL, run_settle, NULL) == 0);
    }
    for (size_t i = 0; i < count; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
}

/*
 * What is free but not at an arena's end is out of the governor's reach, by the paper's design. Of the rest
 * at most the threshold may stay, and what threads may free between two checks.
 */
static void check_retention(size_t resident_before) {
    size_t resident = process_resident_bytes();
    size_t grown = resident > resident_before ? resident - resident_before : 0;
    struct tops tops = measure_tops();
    size_t inside = mallinfo2().fordblks - tops.free_bytes;
    size_t padding =
        counters->pad_each_bytes * counters->arenas; /* of the footprint when memory was last given back */
    size_t may_stay = counters->threshold_bytes > padding ? counters->threshold_bytes : padding;
    size_t merged =
        (8UL << 20) / 100 * counters->cpus_hundredths; /* what a merge may leave for each CPU in use */
    size_t bound = may_stay + merged + (size_t)(THREADS + 4) * (256UL << 10) + (1UL << 20);
    printf("resident: %zu KiB more than before; tops: %zu KiB of %zu KiB; free inside heaps: %zu KiB; "
           "threshold: %zu KiB; bound: %zu KiB\n",
           grown >> 10, tops.resident_bytes >> 10, tops.free_bytes >> 10, inside >> 10,
           counters->threshold_bytes >> 10, bound >> 10);
    CHECK(tops.resident_bytes <= bound);
    if (!SANITIZED) { /* their shadow memory counts, too */
        CHECK(grown <= inside + bound + (4UL << 20));
    }
}

int main(void) {
    CHECK(activation_is_on());
    size_t resident_before = process_resident_bytes();
    setvbuf(stdout, NULL, _IOLBF, 0);
    seed = check_seed(1);
    stress();

    printf("%zu walks, %zu trims of %zu MiB in %zu ranges, %zu arenas busy, %zu claims, %zu arenas\n",
           counters->walks, counters->trims, counters->bytes_trimmed >> 20, counters->ranges,
           counters->busy_arenas, counters->claims, counters->arenas);
    CHECK(activation_is_on());
    CHECK(counters->trims > 0 && counters->walks >= counters->trims);
    CHECK_EQUAL(counters->failed_purges, 0);
    CHECK(counters->bytes_trimmed >= counters->bytes_purged && counters->bytes_purged > 0);
    CHECK(counters->ranges >= counters->process_madvise_calls + counters->madvise_calls);
    CHECK(counters->arenas >= 3);
    CHECK(counters->bytes_claimed >= counters->claims * 4096);

    settle();
    check_counters();
    check_retention(resident_before);
    compare_with_mallinfo();
    check_malloc_info();
    malloc_trim(0);
    check_malloc_info();
    compare_with_mallinfo();
    in_child(live_as_child);
    check_malloc_info();
    return 0;
}
