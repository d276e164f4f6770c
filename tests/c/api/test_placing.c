/* Where the allocator's large blocks start, and the cost of that, with everything but malloc's own names. */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "api/allocator.h"
#include "calmalloc.h"
#include "check.h"
#include "os/vm.h"
#include "pages.h"

#define KIB  ((size_t)1 << 10)
#define MIB  ((size_t)1 << 20)
#define LINE 64

static uint64_t random_state;

/* ---- a machine of other caches ---- */

size_t __real_hardware_caches_read(const char *root, struct hardware_cache *caches, size_t most);
size_t __wrap_hardware_caches_read(const char *root, struct hardware_cache *caches, size_t most);

static const struct hardware_cache *other_caches; /* NULL: this machine's */
static size_t other_count;
static size_t times_asked;

size_t __wrap_hardware_caches_read(const char *root, struct hardware_cache *caches, size_t most) {
    times_asked++;
    if (other_caches == NULL) {
        return __real_hardware_caches_read(root, caches, most);
    }
    size_t count = other_count < most ? other_count : most;
    memcpy(caches, other_caches, count * sizeof *caches);
    return count;
}

/* Lines of 128 bytes; and a nearest cache whose way is larger than a page. */
static void be_another_machine(void) {
    static const struct hardware_cache caches[] = {
        {.level = 1, .bytes = 128 * KIB, .ways = 8, .line_bytes = 128, .sets = 128, .cpus = 1},
        {.level = 2, .bytes = 256 * KIB, .ways = 2, .line_bytes = 128, .sets = 1024, .cpus = 1}};
    other_caches = caches;
    other_count = sizeof caches / sizeof caches[0];
}

static uint64_t draw(void) {
    return check_random(&random_state);
}

static void set(const char *name, const char *value) {
    CHECK_EQUAL(calm_set(name, value), 0);
}

static struct calm_stats stats_now(void) {
    struct calm_stats stats;
    CHECK_EQUAL(calm_stats(&stats, sizeof stats), 0);
    return stats;
}

static unsigned char *obtain(size_t size) {
    unsigned char *block = calm_malloc(size);
    CHECK(block != NULL);
    return block;
}

/* Bytes that a block of a size takes of the heap, in whole pages. */
static size_t cost_of(const char *placement, size_t size) {
    set("test_placement", placement);
    size_t before = stats_now().in_use;
    void *block = obtain(size);
    size_t cost = stats_now().in_use - before;
    calm_free(block);
    return cost;
}

static size_t start_of(const void *block) {
    return (uintptr_t)block % page_size;
}

static void test_default(void) {
    char value[16];
    CHECK(calm_get("test_placement", value, sizeof value) > 0);
    CHECK(strcmp(value, "colors") == 0);
    CHECK(calm_set("test_placement", "huge") == -1 && errno == EINVAL);
    set("test_placement", "off");
    for (int i = 0; i < 100; i++) {
        CHECK_EQUAL(start_of(obtain(10 * page_size + draw() % MIB)), 0);
    }
}

/* A page more only where the last page has no room for a line, of a block in which it is little. */
static void test_cost(void) {
    const char *modes[] = {"lines", "colors", "random"};
    for (int i = 0; i < 3000; i++) {
        size_t size = 9 * page_size + draw() % (40 * page_size);
        size -= draw() % 3 == 0 ? size % page_size : 0;
        size_t pages = (size + page_size - 1) / page_size;
        size_t plain = cost_of("off", size);
        CHECK_EQUAL(plain, pages * page_size);
        size_t room = pages * page_size - size;
        size_t more = cost_of(modes[i % 3], size) - plain;
        CHECK_EQUAL(more, room < LINE && size >= 16 * page_size ? page_size : 0);
    }
}

/* What is aligned to more than a line is not placed, and pays nothing for it. */
static void test_cost_of_alignment(void) {
    const char *modes[] = {"off", "lines", "colors", "random"};
    for (size_t alignment = 2 * LINE; alignment <= 2 * page_size; alignment *= 2) {
        for (size_t mode = 0; mode < sizeof modes / sizeof modes[0]; mode++) {
            void *block = NULL;
            set("test_placement", modes[mode]);
            size_t before = stats_now().in_use;
            CHECK_EQUAL(calm_posix_memalign(&block, alignment, MIB), 0);
            CHECK_EQUAL(stats_now().in_use - before, MIB);
            CHECK((uintptr_t)block % alignment == 0);
            calm_free(block);
        }
    }
}

/* The least distance on the page between two blocks of a row that follow each other. */
static size_t nearest_neighbours(void) {
    enum { BLOCKS = 64 };
    unsigned char *row[BLOCKS];
    size_t nearest = page_size;
    for (size_t i = 0; i < BLOCKS; i++) {
        row[i] = obtain(MIB);
        size_t apart = i == 0 ? page_size / 2 : (start_of(row[i]) - start_of(row[i - 1])) % page_size;
        apart = apart < page_size - apart ? apart : page_size - apart;
        nearest = apart < nearest ? apart : nearest;
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        calm_free(row[i]);
    }
    return nearest;
}

/* Of 64 neighbours at random all are a third of a page apart once in 4^63. */
static void test_chance(void) {
    if (page_size > 4096) { /* blocks begin within a way of the cache, which may be less than a page */
        return;
    }
    const size_t third = page_size / 8 * 3 - LINE;
    set("test_placement", "lines");
    CHECK(nearest_neighbours() >= third);
    set("test_placement", "random");
    CHECK(nearest_neighbours() < third);
}

/* After a few blocks, which need not wait for it, lines are those of the machine. */
static void test_lines_of_the_machine(void) {
    be_another_machine();
    set("test_placement", "lines");
    for (size_t i = 0; i < 8; i++) {
        obtain(MIB);
    }
    CHECK_EQUAL(times_asked, 0);
    obtain(MIB);
    CHECK_EQUAL(times_asked, 1);
    for (size_t i = 0; i < 64; i++) {
        CHECK_EQUAL(start_of(obtain(MIB)) % 128, 0);
    }
    CHECK_EQUAL(times_asked, 1);
    /* Less room than its line has costs a page. */
    CHECK_EQUAL(cost_of("lines", 32 * page_size - LINE), 33 * page_size);
    CHECK_EQUAL(cost_of("lines", 32 * page_size - 128), 32 * page_size);
}

/* Each byte is as the one before it. */
static bool is_all(const unsigned char *block, size_t bytes, unsigned char value) {
    return block[0] == value && memcmp(block, block + 1, bytes - 1) == 0;
}

/* Blocks that live together share no byte, and have all that they say they have. */
static void test_contents(void) {
    enum { BLOCKS = 300 };
    static unsigned char *blocks[BLOCKS];
    static size_t sizes[BLOCKS];
    const char *modes[] = {"off", "lines", "colors", "random"};
    for (int round = 0; round < 6000; round++) {
        set("test_placement", modes[draw() % 4]);
        size_t i = draw() % BLOCKS;
        size_t size = 8 * page_size + KIB + draw() % (draw() % 20 == 0 ? 2 * MIB : 50 * page_size);
        if (blocks[i] == NULL) {
            unsigned how = draw() % 4;
            size_t alignment = (size_t)16 << draw() % 18;
            void *aligned = NULL;
            blocks[i] = how == 0 ? calm_calloc(1, size) : how == 1 ? NULL : obtain(size);
            if (how == 1) {
                CHECK_EQUAL(calm_posix_memalign(&aligned, alignment, size), 0);
                CHECK((uintptr_t)aligned % alignment == 0);
                blocks[i] = aligned;
            }
            CHECK(blocks[i] != NULL && (uintptr_t)blocks[i] % LINE == 0);
            CHECK(how != 0 || is_all(blocks[i], size, 0));
        } else {
            CHECK(calm_malloc_usable_size(blocks[i]) >= sizes[i]);
            CHECK(is_all(blocks[i], sizes[i], (unsigned char)i));
            if (draw() % 2 == 0) {
                calm_free(blocks[i]);
                blocks[i] = NULL;
                continue;
            }
            unsigned char *other = calm_realloc(blocks[i], size);
            CHECK(other != NULL);
            CHECK(is_all(other, size < sizes[i] ? size : sizes[i], (unsigned char)i));
            blocks[i] = other;
        }
        sizes[i] = calm_malloc_usable_size(blocks[i]);
        CHECK(sizes[i] >= size);
        memset(blocks[i], (unsigned char)i, sizes[i]);
    }
    for (size_t i = 0; i < BLOCKS; i++) {
        calm_free(blocks[i]);
    }
    calm_trim(0);
    CHECK_EQUAL(stats_now().in_use, 0);
}

/* Growth by moving pages keeps the bytes where they are in their pages. */
static void test_moves(void) {
    if (!pages_can_move()) {
        return;
    }
    set("test_placement", "lines");
    uint64_t moves = stats_now().large_moves;
    for (int i = 0; i < 50; i++) {
        size_t size = 75 * page_size + draw() % MIB;
        unsigned char *block = obtain(size);
        void *wall = obtain(16 * page_size); /* behind it, so that it cannot stay */
        memset(block, 77, size);
        size_t start = start_of(block);
        block = calm_realloc(block, 4 * size);
        CHECK(block != NULL && start_of(block) == start);
        CHECK(block[0] == 77 && block[size - 1] == 77);
        memset(block, 78, 4 * size);
        block = calm_realloc(block, size / 2);
        CHECK(block != NULL && block[0] == 78 && block[size / 2 - 1] == 78);
        calm_free(block);
        calm_free(wall);
    }
    CHECK(stats_now().large_moves > moves);
    calm_trim(0);
    CHECK_EQUAL(stats_now().in_use, 0);
}

/* The arrays of a numerical program: equal, of whole pages, from one loop. */
static void test_arrays_differ(void) {
    enum { ARRAYS = 16 };
    set("test_placement", "colors");
    for (size_t size = 16 * page_size; size <= 4 * MIB; size *= 2) {
        unsigned char *arrays[ARRAYS];
        for (int i = 0; i < ARRAYS; i++) {
            arrays[i] = obtain(size);
            for (int k = 0; k < i; k++) {
                size_t apart = (start_of(arrays[i]) - start_of(arrays[k])) % 4096;
                CHECK(apart >= LINE && apart <= 4096 - LINE);
            }
        }
        for (int i = 0; i < ARRAYS; i++) {
            calm_free(arrays[i]);
        }
    }
}

/* An end that a block's place in its page has no part in, or that no memory reaches, is refused, and the
 * block kept. */
static void test_resizing_to_too_much(void) {
    set("test_placement", "lines");
    unsigned char *block;
    do {
        block = obtain(MIB);
    } while (start_of(block) == 0);
    size_t usable = calm_malloc_usable_size(block);
    memset(block, 5, usable);
    for (size_t less = 0; less < 2 * page_size; less += 16) {
        errno = 0;
        CHECK(calm_realloc(block, SIZE_MAX - less) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(calm_realloc(block, (size_t)PTRDIFF_MAX + 1 + less) == NULL && errno == ENOMEM);
        errno = 0;
        CHECK(calm_realloc(block, (size_t)PTRDIFF_MAX - less) == NULL && errno == ENOMEM);
    }
    CHECK_EQUAL(calm_malloc_usable_size(block), usable);
    CHECK(block[0] == 5 && block[usable - 1] == 5);
    calm_free(block);
}

static void test_misuse(void) {
    set("misuse", "warn");
    set("test_placement", "lines");
    size_t misuses = calm_arenas.of[0].heap.misuses;
    unsigned char *block;
    do {
        block = obtain(25 * page_size + 1);
    } while (start_of(block) == 0);
    calm_free(block - start_of(block)); /* its page, but not it */
    CHECK_EQUAL(calm_arenas.of[0].heap.misuses, ++misuses);
    calm_free(block + LINE);
    CHECK_EQUAL(calm_arenas.of[0].heap.misuses, ++misuses);
    CHECK_EQUAL(calm_malloc_usable_size(block + LINE), 0);
    calm_free(block);
    CHECK_EQUAL(calm_arenas.of[0].heap.misuses, misuses);
    calm_free(block);
    CHECK_EQUAL(calm_arenas.of[0].heap.misuses, ++misuses);
    CHECK_EQUAL(calm_arenas.of[0].heap.misuse[(misuses - 1) % MISUSE_RECORDS].kind, MISUSE_DOUBLE_FREE);
}

/* What the colors know of the blocks is what is there: at least so many are at the fullest. */
static size_t over_even_share(const struct colors *colors, size_t *most) {
    size_t sum = 0;
    *most = 0;
    for (size_t i = 0; i < colors->caches[0].colors; i++) {
        size_t here = colors->caches[0].blocks[i];
        sum += here;
        *most = here > *most ? here : *most;
    }
    CHECK_EQUAL(sum, colors->blocks);
    return sum;
}

/* As if all blocks before had been touched, and cheaply; or none. No block is a control. */
static void set_evidence(bool dense) {
    for (size_t i = 0; i < THP_CLASSES; i++) {
        calm_arenas.of[0].thp.classes[i].score = dense ? 16 : 0;
        calm_arenas.of[0].thp.classes[i].handed_out = 0;
    }
    calm_arenas.of[0].thp.costly_until_ns = 0;
}

/* One that gets huge pages, if there are any. */
static unsigned char *obtain_dense(size_t size) {
    set_evidence(true);
    return obtain(size);
}

/* Blocks of exactly a huge page would all begin where huge pages do. */
static void test_colors_of_huge_blocks(void) {
    enum { BLOCKS = 60 };
    size_t huge = calm_arenas.of[0].heap.runs.region_pages * page_size;
    if (huge == 0 || huge > 2 * MIB) {
        printf("no huge pages to be had here, or too large ones\n");
        return;
    }
    set("test_placement", "colors");
    void *ballast = calm_calloc(1, 1024 * MIB); /* the bound that it brings allows huge regions */
    struct heap *heap = &calm_arenas.of[0].heap;
    /* 2 ways of 128 KiB: 32 colors, 64 blocks. */
    const struct hardware_cache cache = {
        .level = 2, .bytes = 256 * KIB, .ways = 2, .line_bytes = 64, .sets = 2048, .cpus = 1};
    colors_init(&heap->colors, &cache, 1, page_size, huge, 0);
    calm_arenas.of[0].has_colors = true;
    unsigned char *blocks[BLOCKS];
    size_t in_huge = 0;
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] =
            obtain_dense(huge - 8); /* no room for a line: it takes a page more, and is moved on by that */
        in_huge += heap_large_span(heap, blocks[i])->huge;
        CHECK_EQUAL(heap_large_span(heap, blocks[i])->colored, heap_large_span(heap, blocks[i])->huge);
    }
    size_t most;
    CHECK_EQUAL(over_even_share(&heap->colors, &most), in_huge);
    CHECK(in_huge > BLOCKS / 2);
    CHECK(most <= 2);
    /* In place of those that go come others, of sizes that a page more would not move. */
    for (int round = 0; round < 400; round++) {
        size_t i = draw() % BLOCKS;
        calm_free(blocks[i]);
        blocks[i] = obtain_dense((1 + draw() % 2) * huge - 2 * page_size + LINE + draw() % page_size);
        CHECK(over_even_share(&heap->colors, &most) > 0);
    }
    CHECK(most <= 2);
    /* Grown blocks that move to small pages are no longer counted. */
    for (int i = 0; i < BLOCKS; i++) {
        blocks[i] = calm_realloc(blocks[i], 5 * huge);
        CHECK(blocks[i] != NULL);
        calm_free(blocks[i]);
    }
    CHECK_EQUAL(over_even_share(&heap->colors, &most), 0);
    calm_free(ballast);
}

/* Where a color is full, a block takes no more than the pages that it leaves out, and makes none of what is
 * free look used. */
static void test_colors_cost_little(void) {
    size_t unit = calm_arenas.of[0].heap.runs.region_pages;
    size_t huge = unit * page_size;
    if (huge == 0 || huge > 2 * MIB) {
        return;
    }
    set("test_placement", "colors");
    struct heap *heap = &calm_arenas.of[0].heap;
    const struct hardware_cache cache = {
        .level = 2, .bytes = 256 * KIB, .ways = 2, .line_bytes = 64, .sets = 2048, .cpus = 1};
    colors_init(&heap->colors, &cache, 1, page_size, huge, 0);
    calm_arenas.of[0].has_colors = true;
    void *ballast = calm_calloc(1, 1024 * MIB);
    size_t checked = 0;
    for (size_t regions = 1; regions <= 8; regions++) {
        size_t size = regions * huge - LINE; /* it has room, and needs no page for that */
        void *first = obtain_dense(size);
        void *second = obtain_dense(size);
        size_t made = heap->runs.regions;
        size_t dirty = heap_dirty_pages(heap);
        void *third = obtain_dense(size); /* two begin where huge pages do: it may not */
        CHECK(heap->runs.regions <= made + regions + 1);
        CHECK(heap_dirty_pages(heap) <= dirty + unit);
        /* Where small pages were at hand, they were taken. */
        bool all_huge = heap_large_span(heap, first)->huge && heap_large_span(heap, second)->huge;
        CHECK(!all_huge || (uintptr_t)heap_large_span(heap, third)->base % huge != 0);
        checked += all_huge;
        calm_free(first);
        calm_free(second);
        calm_free(third);
        calm_trim(0);
    }
    CHECK(checked > 0);
    calm_free(ballast);
}

/* The machine is asked for its caches with the first huge pages, and the nearest one is left out. */
static void test_machine_is_asked(void) {
    size_t huge = calm_arenas.of[0].heap.runs.region_pages * page_size;
    struct hardware_cache caches[MAX_HARDWARE_CACHES];
    size_t count = hardware_caches_read("", caches, MAX_HARDWARE_CACHES);
    const struct colors *colors = &calm_arenas.of[0].heap.colors;
    void *ballast = calm_calloc(1, 1024 * MIB);
    CHECK_EQUAL(colors->count, 0);
    unsigned char *block = obtain_dense(huge == 0 ? 4 * MIB : 2 * huge);
    if (heap_large_span(&calm_arenas.of[0].heap, block)->huge) {
        struct colors expected;
        size_t outer = 0;
        while (outer < count && caches[outer].level == 1) {
            outer++;
        }
        colors_init(&expected, caches + outer, count - outer, page_size, huge, 0);
        CHECK_EQUAL(colors->count, expected.count);
        for (size_t i = 0; i < expected.count; i++) {
            CHECK_EQUAL(colors->caches[i].colors, expected.caches[i].colors);
            CHECK_EQUAL(colors->caches[i].capacity, expected.caches[i].capacity);
        }
        CHECK_EQUAL(colors->blocks, 1);
        uint64_t seed = colors->seed;
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            _exit(colors->seed == seed);
        }
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
    }
    calm_free(block);
    calm_free(ballast);
}

/* Once, and as soon as a block can lie in a huge page, whatever blocks were before. */
static void test_machine_is_asked_once(void) {
    if (calm_arenas.of[0].heap.runs.region_pages * page_size != 2 * MIB) {
        return;
    }
    struct heap *heap = &calm_arenas.of[0].heap;
    size_t most;
    be_another_machine();
    void *ballast = calm_calloc(1, 1024 * MIB);
    set_evidence(false);
    obtain(3 * MIB);
    CHECK_EQUAL(times_asked, 0);
    set("test_placement", "off");
    unsigned char *first = obtain_dense(3 * MIB);
    CHECK(heap->runs.regions > 0);
    CHECK_EQUAL(times_asked, 0);
    set("test_placement", "colors");
    set_evidence(false);
    obtain(3 * MIB);
    CHECK_EQUAL(times_asked, 1);
    /* Not the nearest one: with 32 colors of 2 blocks there is one such cache. */
    CHECK_EQUAL(heap->colors.count, 1);
    CHECK_EQUAL(heap->colors.caches[0].colors, 32);
    CHECK_EQUAL(heap->colors.caches[0].capacity, 2);
    size_t colored = heap->colors.blocks;
    for (size_t i = 0; i < 5; i++) {
        colored += heap_large_span(heap, obtain_dense(3 * MIB))->colored;
    }
    CHECK_EQUAL(times_asked, 1);
    CHECK_EQUAL(over_even_share(&heap->colors, &most), colored);
    CHECK(colored > 0);
    calm_free(first);
    CHECK_EQUAL(heap->colors.blocks, colored);
    calm_free(ballast);
}

static void test_lines_alone_have_no_colors(void) {
    be_another_machine();
    void *ballast = calm_calloc(1, 1024 * MIB);
    const char *others[] = {"off", "lines", "random"};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        set("test_placement", others[i]);
        unsigned char *block = obtain_dense(3 * MIB);
        CHECK(!heap_large_span(&calm_arenas.of[0].heap, block)->colored);
    }
    CHECK_EQUAL(times_asked, 0);
    calm_free(ballast);
}

/* A huge page that is not filled is much to a program that uses little, however cheap memory is. */
static void test_small_programs_have_no_huge_pages(void) {
    if (calm_arenas.of[0].heap.runs.region_pages * page_size != 2 * MIB) {
        return;
    }
    set("memory_per_cpu", "1600");
    while (heap_used_pages(&calm_arenas.of[0].heap) * page_size < 12 * MIB) {
        CHECK(!heap_large_span(&calm_arenas.of[0].heap, obtain_dense(2 * MIB))->huge);
        obtain(8 * KIB);
    }
    CHECK_EQUAL(calm_arenas.of[0].heap.runs.regions, 0);
    /* What it asks for now counts. */
    CHECK(heap_large_span(&calm_arenas.of[0].heap, obtain_dense(6 * MIB))->huge);
}

/* Blocks are looked at wherever in their pages they begin. */
static void test_placed_blocks_are_judged(void) {
    enum { BLOCKS = 100 };
    set("test_placement", "lines");
    for (size_t i = 0; i < BLOCKS; i++) {
        unsigned char *block = obtain(MIB);
        memset(block, 1, MIB);
    }
    CHECK(thp_policy_expect(&calm_arenas.of[0].thp, MIB / page_size) != THP_NONE || !residency_is_told());
}

/* The first blocks of a process, as where they begin in their pages. */
static unsigned long signature(void) {
    unsigned long sum = 0;
    for (int i = 0; i < 4; i++) {
        sum = sum * 64 + start_of(obtain(100 * page_size + 1)) / LINE;
    }
    return sum;
}

static void test_children_differ(void) {
    enum { CHILDREN = 6 };
    set("test_placement", "lines");
    signature();
    unsigned long signatures[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
        int ends[2];
        CHECK_EQUAL(pipe(ends), 0);
        pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            unsigned long mine = signature();
            _exit(write(ends[1], &mine, sizeof mine) == sizeof mine ? 0 : 1);
        }
        CHECK(read(ends[0], &signatures[i], sizeof signatures[i]) == sizeof signatures[i]);
        int status;
        CHECK(waitpid(child, &status, 0) == child && status == 0);
        close(ends[0]);
        close(ends[1]);
    }
    int equal = 0;
    for (int i = 1; i < CHILDREN; i++) {
        equal += signatures[i] == signatures[0];
    }
    CHECK(equal < CHILDREN - 1); /* all alike by chance: once in 64^5 */
}

int main(void) {
    random_state = check_seed(1);
    page_size = vm_page_size();
    in_child(test_default);
    in_child(test_cost);
    in_child(test_cost_of_alignment);
    in_child(test_chance);
    in_child(test_lines_of_the_machine);
    in_child(test_contents);
    in_child(test_moves);
    in_child(test_arrays_differ);
    in_child(test_resizing_to_too_much);
    in_child(test_misuse);
    in_child(test_colors_of_huge_blocks);
    in_child(test_colors_cost_little);
    in_child(test_machine_is_asked);
    in_child(test_machine_is_asked_once);
    in_child(test_lines_alone_have_no_colors);
    in_child(test_small_programs_have_no_huge_pages);
    in_child(test_placed_blocks_are_judged);
    in_child(test_children_differ);
    return 0;
}
