/* Demand in isolation: the period that follows from gaps, how long they are remembered, and the cost; and
 * that the cost of any history stays within its share. */
#include "policy/demand.h"

#include "check.h"

#include <stdint.h>
#include <string.h>

#define EPOCH_NS ((double)DEMAND_EPOCH_NS)
#define LONGEST  ((size_t)1 << (DEMAND_PERIODS - 1))

static struct demand demand;

/* A page costs a microsecond: half of it is its purge. */
static const struct demand_price price = {.fault_ns = 500, .share = 0.01};

static void start(void) {
    memset(&demand, 0, sizeof demand);
}

/* A program that uses one CPU. */
static struct demand_epoch epoch(size_t used) {
    return (struct demand_epoch){
        .ns = EPOCH_NS, .cpu_ns = EPOCH_NS, .max_used = used, .used_last = used, .max_held = used};
}

static void pass(struct demand_epoch last, size_t times) {
    for (size_t i = 0; i < times; i++) {
        demand_record(&demand, &last, price);
    }
}

/* So many pages in one epoch, and in none for so many more. */
static void tooth(size_t pages, size_t gap) {
    pass(epoch(pages), 1);
    pass(epoch(0), gap);
}

static void test_begins_short(void) {
    start();
    CHECK(demand_peak_pages(&demand) == 0 && demand_unused_pages(&demand, 1000, 0) == 0 &&
          !demand_is_over_budget(&demand));
    pass(epoch(1000), 1);
    CHECK_EQUAL(demand_period(&demand), 2);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    pass(epoch(0), 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    pass(epoch(0), 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 0);
}

/* Gaps that would cost too much make a period that spans them. */
static void test_spans_gaps(void) {
    for (size_t gap = 1; gap < LONGEST; gap = gap * 3 / 2 + 1) {
        start();
        for (int i = 0; i < 3; i++) {
            tooth(1000000, gap); /* a second's cost, of 13 seconds at most */
        }
        CHECK(demand_period(&demand) > gap);
        CHECK(demand_period(&demand) <= 4 * (gap + 1) || demand_period(&demand) == 2);
        CHECK_EQUAL(demand_peak_pages(&demand), 1000000);
    }
}

/* Those that cost little do not. */
static void test_pays_for_gaps(void) {
    start();
    for (int i = 0; i < 100; i++) {
        tooth(100, 9); /* 0.1 ms of a second */
    }
    CHECK_EQUAL(demand_period(&demand), 2);
    CHECK(demand_peak_pages(&demand) == 0);
}

/* A level that is new is no gap, and neither is one that is older than what is remembered. */
static void test_growth_is_no_gap(void) {
    start();
    for (size_t i = 0; i < 1000; i++) {
        pass(epoch(i * 1000), 1);
    }
    CHECK_EQUAL(demand_period(&demand), 2);
    start();
    for (int i = 0; i < 3; i++) {
        tooth(1000000, 2 * DEMAND_EPOCHS);
    }
    CHECK_EQUAL(demand_period(&demand), 2);
}

/* Once a program has done with its waves, the period shrinks again. */
static void test_forgets(void) {
    start();
    for (int i = 0; i < 5; i++) {
        tooth(100000, 20);
    }
    CHECK(demand_period(&demand) >= 32);
    size_t epochs = 0;
    for (; demand_period(&demand) > 2; epochs++) {
        pass(epoch(0), 1);
        CHECK(epochs < 100 * DEMAND_EPOCHS);
    }
    CHECK(epochs > DEMAND_EPOCHS / 4);
}

/* A purge that was measured to cost a thousand times too much makes a long period, in which nothing is purged
 * that would show what it costs; yet it does not last. */
static void test_forgets_a_wrong_price(void) {
    start();
    struct demand_epoch last = epoch(1000);
    last.purged_pages = 1000;
    last.purge_ns = 5e8;
    pass(last, 1);
    size_t teeth = 0;
    for (; teeth < 3 || demand_period(&demand) > 2; teeth++) {
        tooth(1000, 9);
        CHECK(teeth != 2 || demand_period(&demand) > 10);
        CHECK(teeth < DEMAND_EPOCHS);
    }
}

/* Nothing may cost anything: all is kept for as long as can be. */
static void test_no_share(void) {
    start();
    struct demand_epoch last = epoch(1000);
    demand_record(&demand, &last, (struct demand_price){500, 0});
    CHECK_EQUAL(demand_period(&demand), LONGEST);
    /* It cannot be spent, either: or what is unused would never go. */
    last.purged_pages = last.faulted_pages = 100000;
    CHECK(demand_record(&demand, &last, (struct demand_price){500, 0}) > 0);
    CHECK(!demand_is_over_budget(&demand));
}

/* An epoch that no tick ended in time counts as many. */
static void test_long_epochs(void) {
    start();
    pass(epoch(1000), 1);
    struct demand_epoch last = epoch(1000);
    last.used_last = 10;
    last.ns = 5 * EPOCH_NS;
    pass(last, 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 10);
    last.ns = 1e18; /* a century */
    pass(last, 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 10);
    CHECK(!demand_is_over_budget(&demand));
}

static void test_unused_pages(void) {
    start();
    static const size_t min_free[] = {700, 500, 900};
    for (size_t i = 0; i < 3; i++) {
        struct demand_epoch last = epoch(0);
        last.min_free = min_free[i];
        CHECK_EQUAL(demand_unused_pages(&demand, 1000, 0), i < 2 ? 0 : 500);
        pass(last, 1);
    }
    CHECK_EQUAL(demand_unused_pages(&demand, 1000, 0), 500);
    CHECK_EQUAL(demand_unused_pages(&demand, 400, 0), 400); /* of which some are in use again */
    CHECK_EQUAL(demand_unused_pages(&demand, 1000, 450), 50);
    CHECK_EQUAL(demand_unused_pages(&demand, 1000, 501), 0);
    struct demand_epoch last = epoch(0);
    last.min_free = 800;
    pass(last, 1);
    CHECK_EQUAL(demand_unused_pages(&demand, 1000, 0), 800);
}

/* So many pages were given back, and so many were faulted in. */
static double churn(size_t purged, size_t faulted) {
    struct demand_epoch last = epoch(1000);
    last.purged_pages = purged;
    last.purge_ns = (double)purged * 500;
    last.faulted_pages = faulted;
    last.max_held = 5000;
    return demand_record(&demand, &last, price);
}

/* Giving back in vain spends the budget; faults of what was never given back do not. */
static void test_spends(void) {
    start();
    CHECK(churn(0, 100000) == 0 && !demand_is_over_budget(&demand));
    CHECK(churn(100000, 0) == 0 && !demand_is_over_budget(&demand));
    double cost = churn(0, 5000);
    CHECK(cost > 4.9e6 && cost < 5.1e6);
    CHECK(demand_is_over_budget(&demand)); /* of 300 ms of CPU time, 3 */
    CHECK_EQUAL(demand_unused_pages(&demand, 1000, 0), 0);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    CHECK_EQUAL(demand_held_pages(&demand), 5000);

    /* A program that rests is given no respite. */
    struct demand_epoch last = epoch(0);
    last.cpu_ns = 0;
    size_t epochs = 0;
    for (; demand_is_over_budget(&demand); epochs++) {
        pass(last, 1);
        CHECK(epochs < 10);
    }
    CHECK(epochs >= 2);
    pass(epoch(0), 1);
    CHECK(demand_is_over_budget(&demand));
    pass(epoch(0), DEMAND_EPOCHS);
    CHECK(!demand_is_over_budget(&demand));
}

/* What was given back long ago counts the less. */
static void test_old_purges_fade(void) {
    start();
    churn(100000, 0);
    pass(epoch(0), 10 * DEMAND_EPOCHS);
    CHECK(churn(0, 100000) < 1e6);
}

/* ---- a program, and a policy that gives back what it does not use ---- */

static uint64_t random_state = 1;

static size_t below(size_t bound) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % bound;
}

/* Levels of use of any kind: the cost of giving back what is beyond the period's most is at most a few times
 * the share of the CPU time, whatever comes. */
static void test_any_past(void) {
    for (int kind = 0; kind < 20; kind++) {
        start();
        size_t held = 0, used = 0;
        size_t gap = 0, max_gaps = 1 + below(200);
        double cost = 0, cpu = 0;
        size_t purged = 0, faulted = 0, pending = 0;
        for (int i = 0; i < 20000; i++) {
            if (gap == 0) {
                used = below(100000);
                gap = 1 + below(max_gaps);
            } else {
                gap--;
                used = below(4) == 0 ? used / 2 : used;
            }
            faulted = used > held ? used - held : 0;
            held = used > held ? used : held;
            size_t vain = faulted < pending ? faulted : pending;
            pending -= vain;
            cost += (double)vain * 1000;
            cpu += EPOCH_NS;
            struct demand_epoch last = epoch(used);
            last.purged_pages = purged;
            last.purge_ns = (double)purged * 500;
            last.faulted_pages = faulted;
            last.max_held = held;
            demand_record(&demand, &last, price);
            size_t peak = demand_peak_pages(&demand);
            size_t held_before = demand_held_pages(&demand);
            size_t keep = peak > held_before ? peak : held_before;
            purged = held > keep ? held - keep : 0;
            pending += purged;
            held -= purged;
        }
        printf("gaps of up to %zu epochs: %.2f %% of the CPU time, period %zu\n", max_gaps, 100 * cost / cpu,
               demand_period(&demand));
        CHECK(cost <= 0.02 * cpu);
    }
}

int main(void) {
    random_state = check_seed(88172645463325252U);
    test_begins_short();
    test_spans_gaps();
    test_pays_for_gaps();
    test_growth_is_no_gap();
    test_forgets();
    test_forgets_a_wrong_price();
    test_no_share();
    test_long_epochs();
    test_unused_pages();
    test_spends();
    test_old_purges_fade();
    test_any_past();
    return 0;
}
