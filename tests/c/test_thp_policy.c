/* Huge pages are earned by touched blocks, and not requested while they are costly. */
#include "governor/thp_policy.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "os/clock.h"
#include "test_clock.h"

#define SMALL_NS  600000.0 /* what small pages would take */
#define CHEAP_NS  100000
#define COSTLY_NS 4000000
#define MS        CLOCK_MS

static struct thp_policy earned(void) {
    return (struct thp_policy){.blocks = 1, .score = 16};
}

static uint64_t pause_ms(const struct thp_policy *density) {
    return density->costly_until_ns == 0 ? 0 : (density->costly_until_ns - clock_coarse_ns()) / MS;
}

static void test_dear_ones_pause(void) {
    struct thp_policy density = earned();
    CHECK(thp_policy_allows(&density));
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(thp_policy_allows(&density));
    thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
    CHECK(!thp_policy_allows(&density));
    CHECK_EQUAL(pause_ms(&density), 100);
    clock_advance(100 * MS - 1);
    CHECK(!thp_policy_allows(&density));
    clock_advance(1);
    CHECK(thp_policy_allows(&density));
}

static void test_pauses_double_and_end(void) {
    struct thp_policy density = earned();
    for (uint64_t expected = 100; expected <= 6400; expected *= 2) {
        thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
        CHECK_EQUAL(pause_ms(&density), expected);
    }
    for (int i = 0; i < 10; i++) {
        thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
        CHECK_EQUAL(pause_ms(&density), 10000);
    }
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(thp_policy_allows(&density));
    thp_policy_note_cost(&density, COSTLY_NS, SMALL_NS);
    CHECK_EQUAL(pause_ms(&density), 100);
}

static void test_what_was_not_earned(void) {
    struct thp_policy density = earned();
    density.score = 0;
    thp_policy_note_cost(&density, CHEAP_NS, SMALL_NS);
    CHECK(!thp_policy_allows(&density));
}

/* How many more blocks than at first pass between two looks. */
static void test_what_is_certain_is_asked_seldom(void) {
    static char touched[1 << 16];
    size_t page_size = (size_t)sysconf(_SC_PAGESIZE);
    char *untouched = mmap(NULL, sizeof touched, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(untouched != MAP_FAILED);
    memset(touched, 1, sizeof touched);
    char *base = touched + page_size - (uintptr_t)touched % page_size;
    struct thp_policy density = {.score = 0};
    while (density.score < 15) {
        thp_policy_sample(&density, base, 4 * page_size, page_size);
        CHECK_EQUAL(density.interval, 0); /* not yet sure */
    }
    unsigned before = 0;
    for (int i = 0; i < 20; i++) {
        thp_policy_sample(&density, base, 4 * page_size, page_size);
        CHECK(density.interval > before || density.interval == 64);
        before = density.interval;
    }
    CHECK_EQUAL(before, 64);
    for (int i = 0; i < 20; i++) {
        thp_policy_sample(&density, untouched, sizeof touched, page_size);
    }
    CHECK(!thp_policy_allows(&density));
    CHECK_EQUAL(density.interval, 512);
    thp_policy_sample(&density, base, 4 * page_size, page_size);
    CHECK_EQUAL(density.interval, 0);
}

/* The last page may be there for a block that begins later than it could; those before it count. */
static void test_last_page_is_not_judged(void) {
    enum { PAGES = 8 };
    size_t page_size = (size_t)sysconf(_SC_PAGESIZE);
    for (size_t touched = 0; touched <= PAGES; touched++) {
        char *base =
            mmap(NULL, PAGES * page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(base != MAP_FAILED);
        memset(base, 1, touched * page_size);
        struct thp_policy density = {.score = 1};
        thp_policy_sample(&density, base, PAGES * page_size, page_size);
        CHECK_EQUAL(density.score, touched + 1 >= PAGES ? 2 : 0);
        /* A block of one page is judged by that. */
        density.score = 1;
        thp_policy_sample(&density, base, page_size, page_size);
        CHECK_EQUAL(density.score, touched > 0 ? 2 : 0);
        CHECK(munmap(base, PAGES * page_size) == 0);
    }
}

int main(void) {
    clock_stop();
    test_dear_ones_pause();
    test_pauses_double_and_end();
    test_what_was_not_earned();
    test_what_is_certain_is_asked_seldom();
    test_last_page_is_not_judged();
    return 0;
}
