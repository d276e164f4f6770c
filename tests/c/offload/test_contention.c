/*
 * CPU contention: whether there is a CPU for the server, given its run time, the process's CPU time and the
 * clock.
 */
#include "offload/contention.h"

#include "check.h"
#include "os/clock.h"
#include "test_clock.h"

#define MS CLOCK_MS

/* Time passes: of so many milliseconds the server ran some, and slept some, and the process used what it did
 * on all CPUs. */
static void pass(struct contention *contention, uint64_t passed, uint64_t ran, uint64_t slept,
                 uint64_t used) {
    clock_advance(passed * MS);
    clock_use_cpu(used * MS, ran * MS);
    contention->slept_ns += slept * MS;
}

static bool is_there_after(unsigned cpus, uint64_t passed, uint64_t ran, uint64_t slept, uint64_t used) {
    struct contention contention = {.cpus = cpus};
    CHECK(!contention_check(&contention, clock_now_ns())); /* nothing is known yet */
    CHECK_EQUAL(contention.checked_ns, clock_now_ns());
    bool there = false;
    for (int look = 0; look < CONTENTION_CHECKS; look++) {
        CHECK(!there); /* it takes all of them */
        pass(&contention, passed, ran, slept, used);
        there = contention_check(&contention, clock_now_ns());
    }
    return there;
}

static void test_is_there(void) {
    /* It has all of its CPU, whatever others do. */
    CHECK(!is_there_after(2, 20, 20, 0, 20));
    CHECK(!is_there_after(2, 20, 20, 0, 40));
    CHECK(!is_there_after(2, 20, 18, 0, 40));
    /* It sleeps, and is not in anybody's way: a CPU is idle. */
    CHECK(!is_there_after(2, 20, 0, 20, 20));
    CHECK(!is_there_after(2, 20, 5, 15, 25));
    CHECK(!is_there_after(4, 20, 5, 15, 79 - 20));
    /* Others run on its CPU while it is awake. */
    CHECK(is_there_after(2, 20, 10, 0, 30));
    CHECK(is_there_after(64, 20, 10, 0, 10));
    CHECK(is_there_after(2, 20, 2, 10, 10));
    CHECK(!is_there_after(2, 20, 9, 10, 10));
    /* It sleeps for much of the time, and the others have all CPUs busy. */
    CHECK(is_there_after(2, 20, 2, 18, 40));
    CHECK(is_there_after(4, 20, 2, 18, 78));
    CHECK(!is_there_after(4, 20, 2, 18, 76));
}

/* Not before some milliseconds are over; and then of all that passed since the last look. */
static void test_looks_now_and_then(void) {
    struct contention contention = {.cpus = 2};
    CHECK(!contention_check(&contention, clock_now_ns()));
    uint64_t first = clock_now_ns();
    pass(&contention, 4, 0, 0, 8);
    CHECK(!contention_check(&contention, clock_now_ns()));
    CHECK_EQUAL(contention.checked_ns, first);
    pass(&contention, 4, 4, 0, 4);
    contention.contended_checks = CONTENTION_CHECKS - 1;
    CHECK(contention_check(&contention, clock_now_ns()));
    CHECK_EQUAL(contention.checked_ns, clock_now_ns());
    pass(&contention, 10, 10, 0, 10);
    CHECK(!contention_check(&contention, clock_now_ns()));
    CHECK_EQUAL(contention.slept_ns, 0);
    pass(&contention, 10, 0, 10, 10);
    CHECK(!contention_check(&contention, clock_now_ns()));
    /* What went before a fork, or while the heap was shared, does not count. */
    pass(&contention, 1000, 0, 0, 2000);
    contention.checked_ns = 0;
    CHECK(!contention_check(&contention, clock_now_ns()));
    pass(&contention, 10, 10, 0, 10);
    CHECK(!contention_check(&contention, clock_now_ns()));
}

/* How long it gives way if there is room at once. */
static uint64_t away_ms(struct contention *contention) {
    contention_back_off(contention, clock_now_ns());
    uint64_t from = clock_now_ns();
    while (!contention_is_over(contention, clock_now_ns())) {
        CHECK(clock_now_ns() - from < 10000 * MS);
        pass(contention, 1, 0, 0, 0);
    }
    return (clock_now_ns() - from) / MS;
}

/* For a while, twice as long each time, up to a most. */
static void test_gives_way(void) {
    struct contention contention = {.cpus = 2};
    uint64_t before = away_ms(&contention);
    CHECK_EQUAL(before, 50);
    uint64_t away;
    while ((away = away_ms(&contention)) != before) {
        CHECK(away == 2 * before || away == 3200);
        before = away;
    }
    CHECK_EQUAL(away, 3200);
}

/* Once it was back for many times as long as it was away, the next while is a first one. */
static void test_forgets(void) {
    struct contention contention = {.cpus = 2};
    CHECK_EQUAL(away_ms(&contention), 50);
    CHECK_EQUAL(away_ms(&contention), 100);
    pass(&contention, 1600, 0, 0, 0);
    CHECK_EQUAL(away_ms(&contention), 200);
    pass(&contention, 3201, 0, 0, 0);
    CHECK_EQUAL(away_ms(&contention), 50);
}

/* What is left of the while, within bounds: for who sleeps until it is over. */
static void test_away(void) {
    struct contention contention = {.cpus = 2};
    contention_back_off(&contention, clock_now_ns());
    CHECK_EQUAL(contention_wait_ns(&contention, clock_now_ns(), 100 * MS), 50 * MS);
    CHECK_EQUAL(contention_wait_ns(&contention, clock_now_ns(), 20 * MS), 20 * MS);
    CHECK_EQUAL(contention_wait_ns(&contention, clock_now_ns() + 40 * MS, 100 * MS), 10 * MS);
    CHECK_EQUAL(contention_wait_ns(&contention, clock_now_ns() + 70 * MS, 100 * MS), MS);
}

/* Room is three quarters of a CPU that the process left idle for all of the while. */
static bool has_room_after(unsigned cpus, uint64_t used) {
    struct contention contention = {.cpus = cpus};
    contention_back_off(&contention, clock_now_ns());
    pass(&contention, 49, 0, 0, used);
    CHECK(!contention_is_over(&contention, clock_now_ns()));
    pass(&contention, 1, 0, 0, 0);
    bool room = contention_is_over(&contention, clock_now_ns());
    if (!room) {
        /* Then it looks again as long after, and by what was used since. */
        pass(&contention, 49, 0, 0, 0);
        CHECK(!contention_is_over(&contention, clock_now_ns()));
        pass(&contention, 1, 0, 0, 0);
        CHECK(contention_is_over(&contention, clock_now_ns()));
    }
    return room;
}

static void test_has_room(void) {
    CHECK(has_room_after(2, 0));
    CHECK(has_room_after(2, 62));
    CHECK(!has_room_after(2, 63));
    CHECK(!has_room_after(2, 100));
    CHECK(has_room_after(8, 362));
    CHECK(!has_room_after(8, 363));
}

int main(void) {
    clock_stop();
    test_is_there();
    test_looks_now_and_then();
    test_gives_way();
    test_forgets();
    test_away();
    test_has_room();
    return 0;
}
