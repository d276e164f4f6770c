/* Where large blocks start: lines within a page, and page colors in huge pages. */
#include "placement/colors.h"
#include "placement/lines.h"

#include <stdlib.h>

#include "check.h"

#define PAGE 4096
#define LINE 64

static uint64_t random_state;

static uint64_t draw(void) {
    return check_random(&random_state);
}

static void test_geometry(void) {
    struct line_spread spread = line_spread_for(PAGE, 0, 0);
    CHECK_EQUAL(spread.line_bytes, 64);
    CHECK_EQUAL(spread.spread_bytes, 4096);
    spread = line_spread_for(65536, 128, 16384);
    CHECK_EQUAL(spread.line_bytes, 128);
    CHECK_EQUAL(spread.spread_bytes, 16384);
    /* Starts in one page cannot cover a larger way. */
    CHECK_EQUAL(line_spread_for(PAGE, 64, 16384).spread_bytes, PAGE);
    /* An older store looks the same 4 KiB away, whatever the way. */
    CHECK_EQUAL(line_spread_for(65536, 64, 2048).spread_bytes, 4096);
    /* A line that a page has no room for is none. */
    CHECK_EQUAL(line_spread_for(PAGE, 2 * PAGE, 0).line_bytes, PAGE);
}

/* All that is promised of an offset, for any room, alignment, seed and turn. */
static void test_offsets_fit(void) {
    for (int i = 0; i < 200000; i++) {
        size_t page = (size_t)PAGE << draw() % 3 * 2;
        struct line_spread spread =
            line_spread_for(page, (size_t)64 << draw() % 2, (size_t)4096 << draw() % 3);
        size_t room = draw() % 4 == 0 ? 2 * page : draw() % page;
        size_t alignment = (size_t)16 << draw() % 8;
        size_t offset = line_offset(&spread, draw() % 2 == 0, draw(), draw(), room, alignment);
        CHECK(offset <= room);
        CHECK(offset < spread.spread_bytes);
        CHECK(offset % spread.line_bytes == 0);
        CHECK(offset % alignment == 0);
    }
}

/* Of any n blocks in a row no two are near, and no line gets more than its share, rounded up, and one. */
static void test_even(void) {
    struct line_spread spread = line_spread_for(PAGE, LINE, PAGE);
    for (size_t blocks = 1; blocks <= 2 * PAGE / LINE; blocks++) {
        uint64_t first = draw() % 1000000;
        uint64_t seed = draw();
        unsigned hits[PAGE / LINE] = {0};
        size_t at[2 * PAGE / LINE];
        for (size_t i = 0; i < blocks; i++) {
            at[i] = line_offset(&spread, true, first + i, seed, PAGE, 16);
            CHECK(++hits[at[i] / LINE] <= (blocks + PAGE / LINE - 1) / (PAGE / LINE) + 1);
            for (size_t k = 0; k < i; k++) {
                size_t apart = (at[i] - at[k]) % PAGE;
                apart = apart < PAGE - apart ? apart : PAGE - apart;
                CHECK(apart + LINE > 0.38 * PAGE / (double)blocks); /* rounding to lines takes one at most */
            }
        }
    }
}

/* X[i] = Y[i-1] is the neighbour's: no store is near to one of the other's loads. */
static void test_neighbours_are_far_apart(void) {
    struct line_spread spread = line_spread_for(PAGE, LINE, PAGE);
    for (uint64_t turn = 0; turn < 10000; turn++) {
        uint64_t seed = draw();
        size_t a = line_offset(&spread, true, turn, seed, PAGE, 16);
        size_t b = line_offset(&spread, true, turn + 1, seed, PAGE, 16);
        size_t apart = (a - b) % PAGE;
        CHECK((apart < PAGE - apart ? apart : PAGE - apart) >= 24 * LINE);
    }
}

static void test_small_room_is_used_evenly(void) {
    struct line_spread spread = line_spread_for(PAGE, LINE, PAGE);
    for (size_t lines = 0; lines < PAGE / LINE; lines++) {
        unsigned hits[PAGE / LINE] = {0};
        for (uint64_t turn = 0; turn < 1024; turn++) {
            hits[line_offset(&spread, true, turn, 12345, lines * LINE + 63, 16) / LINE]++;
        }
        for (size_t i = 0; i < PAGE / LINE; i++) {
            size_t share = 1024 / (lines + 1);
            CHECK(i <= lines ? hits[i] + 4 >= share && hits[i] <= share + 5 : hits[i] == 0);
        }
    }
}

static void test_random_differs(void) {
    struct line_spread spread = line_spread_for(PAGE, LINE, PAGE);
    unsigned hits[PAGE / LINE] = {0};
    for (uint64_t turn = 0; turn < 64000; turn++) {
        hits[line_offset(&spread, false, turn, 7, PAGE, 16) / LINE]++;
    }
    for (size_t i = 0; i < PAGE / LINE; i++) {
        CHECK(hits[i] > 800 && hits[i] < 1200); /* 1,000 each, and six standard deviations */
    }
    /* Another seed, another row. */
    size_t equal = 0;
    for (uint64_t turn = 0; turn < 64000; turn++) {
        equal +=
            line_offset(&spread, false, turn, 7, PAGE, 16) == line_offset(&spread, false, turn, 8, PAGE, 16);
    }
    CHECK(equal > 800 && equal < 1200);
}

/* ---- colors ---- */

/* 2 MiB of 16 ways: 32 colors of 16 blocks; and one that is shared, of 8 ways by 4 CPUs: 64 of 2. */
static const struct hardware_cache two_caches[] = {
    {.level = 2, .bytes = 2U << 20, .ways = 16, .line_bytes = 64, .sets = 2048, .cpus = 1},
    {.level = 3, .bytes = 2U << 20, .ways = 8, .line_bytes = 64, .sets = 4096, .cpus = 4},
};
#define HUGE ((size_t)2 << 20)

static void test_capacities(void) {
    struct colors colors;
    colors_init(&colors, two_caches, 2, PAGE, HUGE, 5);
    CHECK_EQUAL(colors.count, 2);
    CHECK_EQUAL(colors.caches[0].colors, 32);
    CHECK_EQUAL(colors.caches[0].capacity, 16);
    CHECK_EQUAL(colors.caches[1].colors, 64);
    CHECK_EQUAL(colors.caches[1].capacity, 2);
    /* An L1 that a page covers has none. */
    const struct hardware_cache covered = {
        .level = 1, .bytes = 32768, .ways = 8, .line_bytes = 64, .sets = 64, .cpus = 1};
    colors_init(&colors, &covered, 1, PAGE, HUGE, 0);
    CHECK_EQUAL(colors.count, 0);
    /* More CPUs than ways leave room for one. */
    const struct hardware_cache crowded = {
        .level = 3, .bytes = 8U << 20, .ways = 16, .line_bytes = 64, .sets = 8192, .cpus = 64};
    colors_init(&colors, &crowded, 1, PAGE, HUGE, 0);
    CHECK_EQUAL(colors.caches[0].colors, 128);
    CHECK_EQUAL(colors.caches[0].capacity, 1);
    /* A way of 30 MiB: 15 huge pages may each have blocks at a color. */
    const struct hardware_cache vast = {
        .level = 3, .bytes = 480U << 20, .ways = 16, .line_bytes = 64, .sets = 491520, .cpus = 2};
    colors_init(&colors, &vast, 1, PAGE, HUGE, 0);
    CHECK_EQUAL(colors.caches[0].colors, 512);
    CHECK_EQUAL(colors.caches[0].capacity, 120);
    /* A way that is larger than a huge page, where those are small. */
    colors_init(&colors, two_caches, 1, PAGE, 16 * PAGE, 0);
    CHECK_EQUAL(colors.caches[0].colors, 16);
    CHECK_EQUAL(colors.caches[0].capacity, 32);
}

static size_t fullest(const size_t *counts, size_t colors) {
    size_t most = 0;
    for (size_t i = 0; i < colors; i++) {
        most = counts[i] > most ? counts[i] : most;
    }
    return most;
}

/* Whatever blocks come and go, no cache has more of a color than it has room for while there is a choice. */
static void test_never_too_many(void) {
    enum { LIVING = 128 }; /* as many as the second cache has room for */
    struct colors colors;
    colors_init(&colors, two_caches, 2, PAGE, HUGE, draw());
    uint64_t pages[LIVING];
    size_t living = 0;
    size_t skipped = 0;
    for (int round = 0; round < 20000; round++) {
        if (living == LIVING || (living > 0 && draw() % 5 < 2)) {
            size_t i = draw() % living;
            colors_remove(&colors, pages[i]);
            pages[i] = pages[--living];
            continue;
        }
        uint64_t page = draw() % 4 == 0 ? draw() % 512 : 0; /* most would begin where huge pages do */
        CHECK(colors_skip_in_huge_page(&colors) < 64);
        size_t skip = colors_skip(&colors, page, SIZE_MAX);
        skipped += skip;
        CHECK(skip < 64);
        pages[living] = page + skip;
        colors_add(&colors, pages[living++]);
        size_t second[32] = {0};
        size_t third[64] = {0};
        for (size_t i = 0; i < living; i++) {
            second[pages[i] % 32]++;
            third[pages[i] % 64]++;
        }
        CHECK(fullest(second, 32) <= 16);
        CHECK(fullest(third, 64) <= 2);
    }
    CHECK(skipped > 0);
    while (living > 0) {
        colors_remove(&colors, pages[--living]);
    }
    CHECK_EQUAL(colors.blocks, 0);
    for (size_t i = 0; i < MAX_COLORS; i++) {
        CHECK_EQUAL(colors.caches[0].blocks[i] + colors.caches[1].blocks[i], 0);
    }
}

/* The fewest pages are left out, none without need; and none beyond what there is. */
static void test_least_skip(void) {
    struct colors colors;
    colors_init(&colors, two_caches, 2, PAGE, HUGE, 0);
    CHECK_EQUAL(colors_skip(&colors, 0, SIZE_MAX), 0); /* as the seed says */
    colors_add(&colors, 0);
    CHECK_EQUAL(colors_skip(&colors, 0, SIZE_MAX), 0);
    colors_add(&colors, 0);
    CHECK_EQUAL(colors_skip(&colors, 0, SIZE_MAX), 1);
    CHECK_EQUAL(colors_skip(&colors, 64, SIZE_MAX), 1);
    CHECK_EQUAL(colors_skip(&colors, 63, SIZE_MAX), 0);
    CHECK_EQUAL(colors_skip(&colors, 0, 0), COLORS_NO_ROOM);
    CHECK_EQUAL(colors_skip_in_huge_page(&colors), 1);
    for (uint64_t page = 1; page < 63; page++) {
        colors_add(&colors, page);
        colors_add(&colors, page);
    }
    CHECK_EQUAL(colors_skip_in_huge_page(&colors), 63);
    CHECK_EQUAL(colors_skip(&colors, 0, 62), COLORS_NO_ROOM);
    CHECK_EQUAL(colors_spare(&colors), 63);
    colors_add(&colors, 63);
    colors_add(&colors, 63);
    CHECK_EQUAL(colors_skip_in_huge_page(&colors), COLORS_NO_ROOM);
    CHECK_EQUAL(colors_skip(&colors, 0, SIZE_MAX), COLORS_NO_ROOM);
}

static void test_processes_differ(void) {
    size_t firsts[64] = {0};
    for (int process = 0; process < 640; process++) {
        struct colors colors;
        colors_init(&colors, two_caches, 2, PAGE, HUGE, draw());
        firsts[colors_skip(&colors, 0, SIZE_MAX)]++;
        CHECK(colors_skip(&colors, 0, 9) <= 9);
    }
    CHECK(fullest(firsts, 64) < 40); /* 10 each, and more than nine standard deviations */
}

int main(void) {
    random_state = check_seed(1);
    test_geometry();
    test_offsets_fit();
    test_even();
    test_neighbours_are_far_apart();
    test_small_room_is_used_evenly();
    test_random_differs();
    test_capacities();
    test_never_too_many();
    test_least_skip();
    test_processes_differ();
    return 0;
}
