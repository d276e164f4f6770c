/* Huge pages are earned by touched blocks, and not requested while they are costly. */
#include "arena/thp_policy.h"

#include <string.h>

#include "check.h"
#include "os/clock.h"
#include "pages.h"
#include "test_clock.h"

#define SMALL_NS  600000.0 /* what small pages would take */
#define CHEAP_NS  100000
#define COSTLY_NS 4000000
#define MS        CLOCK_MS

#define PAGES 64

static struct thp_policy density;

static void give_score(unsigned score) {
    density = (struct thp_policy){0};
    for (size_t i = 0; i < THP_CLASSES; i++) {
        density.classes[i].score = (uint8_t)score;
    }
}

static unsigned max_score(void) {
    unsigned most = 0;
    for (size_t i = 0; i < THP_CLASSES; i++) {
        most = density.classes[i].score > most ? density.classes[i].score : most;
    }
    return most;
}

static bool allows(void) {
    return thp_policy_expect(&density, PAGES) == THP_SURE && !thp_policy_is_costly(&density);
}

static uint64_t pause_ms(void) {
    return density.costly_until_ns == 0 ? 0 : (density.costly_until_ns - clock_coarse_ns()) / MS;
}

static void test_dear_ones_pause(void) {
    give_score(16);
    CHECK(allows());
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(allows());
    thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
    CHECK(!allows());
    CHECK_EQUAL(pause_ms(), 100);
    clock_advance(100 * MS - 1);
    CHECK(!allows());
    clock_advance(1);
    CHECK(allows());
}

static void test_pauses_double_and_end(void) {
    give_score(16);
    for (uint64_t expected = 100; expected <= 6400; expected *= 2) {
        thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
        CHECK_EQUAL(pause_ms(), expected);
    }
    for (int i = 0; i < 10; i++) {
        thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
        CHECK_EQUAL(pause_ms(), 10000);
    }
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(allows());
    thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
    CHECK_EQUAL(pause_ms(), 100);
}

static void test_what_was_not_earned(void) {
    give_score(0);
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(!allows());
}

static char *map(size_t pages, size_t touched) {
    char *base = (char *)map_pages(pages);
    memset(base, 1, touched * page_size);
    return base;
}

static void sample(char *base, size_t pages, bool freed) {
    thp_policy_sample(&density, base, pages * page_size, page_size, freed);
}

/* How many more blocks than at first pass between two looks. */
static void test_what_is_certain_is_asked_seldom(void) {
    char *touched = map(PAGES, PAGES);
    char *untouched = map(PAGES, 0);
    give_score(0);
    while (max_score() < 15) {
        sample(touched, PAGES, false);
        CHECK_EQUAL(density.interval, 0); /* not yet sure */
    }
    unsigned before = 0;
    for (int i = 0; i < 20; i++) {
        sample(touched, PAGES, false);
        CHECK(density.interval > before || density.interval == 64);
        before = density.interval;
    }
    CHECK_EQUAL(before, 64);
    for (int i = 0; i < 20; i++) {
        sample(untouched, PAGES, false);
    }
    CHECK(!allows());
    CHECK_EQUAL(density.interval, 512);
    sample(touched, PAGES, false);
    CHECK_EQUAL(density.interval, 0);
}

/* The last page may be there for a block that begins later than it could; those before it count. */
static void test_last_page_is_not_judged(void) {
    enum { FEW = 8 };
    for (size_t touched = 0; touched <= FEW; touched++) {
        char *base = map(FEW, touched);
        density = (struct thp_policy){0};
        sample(base, FEW, false);
        CHECK_EQUAL(max_score(), touched + 1 >= FEW ? 1 : 0);
    }
}

/* One freed block tells of its class, and of no other. */
static void test_classes_are_apart(void) {
    density = (struct thp_policy){0};
    sample(map(16 * PAGES, 16 * PAGES), 16 * PAGES, true);
    CHECK_EQUAL(thp_policy_expect(&density, 16 * PAGES), THP_SURE);
    CHECK_EQUAL(thp_policy_expect(&density, 16 * PAGES + 1), THP_SURE);
    CHECK_EQUAL(thp_policy_expect(&density, 8 * PAGES), THP_NONE);
    CHECK_EQUAL(thp_policy_expect(&density, 24 * PAGES), THP_NONE);
    CHECK_EQUAL(thp_policy_expect(&density, UINT32_MAX), THP_NONE);
    sample(map(16 * PAGES, 0), 16 * PAGES, true);
    CHECK_EQUAL(thp_policy_expect(&density, 16 * PAGES), THP_NONE);
}

/* Of a block of which the program touches the ends alone. */
static void test_the_middle_counts(void) {
    char *base = map(16 * PAGES, 1);
    memset(base + 12 * PAGES * page_size, 1, 4 * PAGES * page_size);
    density = (struct thp_policy){0};
    sample(base, 16 * PAGES, true);
    CHECK_EQUAL(thp_policy_expect(&density, 16 * PAGES), THP_NONE);
}

static void test_controls(void) {
    size_t controls = 0;
    give_score(16);
    for (int i = 0; i < 320; i++) {
        controls += thp_policy_expect(&density, PAGES) == THP_CONTROL;
    }
    CHECK_EQUAL(controls, 10);
}

int main(void) {
    page_size = (size_t)sysconf(_SC_PAGESIZE);
    clock_stop();
    test_dear_ones_pause();
    test_pauses_double_and_end();
    test_what_was_not_earned();
    test_controls();
    if (residency_is_told()) {
        test_what_is_certain_is_asked_seldom();
        test_last_page_is_not_judged();
        test_classes_are_apart();
        test_the_middle_counts();
    }
    return 0;
}
