/* Demand in isolation: for how long memory is kept, by its price and by what is known of it; what that costs,
 * compared with the optimum that knows the future, whatever comes; and fragmentation. */
#include "policy/demand.h"

#include "check.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define EPOCH_NS ((double)DEMAND_EPOCH_NS)
#define EPOCH_S  (EPOCH_NS / 1e9)

static struct demand demand;

/* A page costs a microsecond, half of it its purge, and is kept for 3 s at that cost. */
static struct demand_price price = {.fault_ns = 500, .page_seconds = 3e6};
static const double break_even_s = 3;

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

/* Epochs without use until so many pages are not kept any more. */
static size_t epochs_kept(size_t pages) {
    size_t epochs = 0;
    for (; demand_peak_pages(&demand) >= pages; epochs++) {
        pass(epoch(0), 1);
        CHECK(epochs < 10000);
    }
    return epochs;
}

static bool is_about(double value, double wanted) {
    return value > wanted - 0.15 && value < wanted + 0.15;
}

static void test_rents_as_long_as_buying_costs(void) {
    start();
    CHECK_EQUAL(demand_peak_pages(&demand), 0);
    pass(epoch(1000), 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    CHECK(is_about((double)epochs_kept(1) * EPOCH_S, break_even_s));
    /* By the price, in proportion. */
    for (double times = 0.25; times <= 4; times *= 2) {
        start();
        price.page_seconds *= times;
        pass(epoch(1000), 1);
        CHECK(is_about((double)epochs_kept(1) * EPOCH_S, break_even_s * times));
        price.page_seconds /= times;
    }
}

static void test_memory_that_is_worth_nothing(void) {
    start();
    price.page_seconds = 0;
    pass(epoch(1000), 1);
    CHECK_EQUAL(epochs_kept(1), 1);
    price.page_seconds = 3e6;
}

/* A new price holds for what is kept already, too. */
static void test_a_price_that_rises(void) {
    start();
    pass(epoch(1000), 1);
    pass(epoch(0), 2);
    price.page_seconds *= 2;
    CHECK(is_about((double)epochs_kept(1) * EPOCH_S, 2 * break_even_s - 2 * EPOCH_S));
    price.page_seconds /= 2;
}

static void test_a_price_that_falls(void) {
    start();
    price.page_seconds *= 1e6;
    pass(epoch(1000), 1);
    pass(epoch(0), 100);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    price.page_seconds /= 1e6;
    CHECK_EQUAL(epochs_kept(1), 1);
}

/* Kept memory that is used again has saved its faults; what faulted all the same has not. */
static void test_savings(void) {
    start();
    tooth(1000, 5);
    struct demand_epoch last = epoch(1000);
    double saved = demand_record(&demand, &last, price).saved_ns;
    CHECK(saved > 0.9e6 && saved < 1.1e6);
    pass(epoch(0), 5);
    last.faulted_pages = 1000;
    CHECK(demand_record(&demand, &last, price).saved_ns == 0);
}

/* Two bursts are a pattern. */
static void test_knows_a_gap_from_its_second(void) {
    for (size_t gap = 1; gap < 1000; gap = gap * 3 / 2 + 1) {
        start();
        tooth(100000, gap);
        pass(epoch(100000), 1);
        size_t kept = epochs_kept(1);
        bool is_soon = (double)gap * EPOCH_S * 2 + 2 * EPOCH_S <= break_even_s;
        if (is_soon) { /* through the next one like it, and not for much longer */
            CHECK(kept > gap && kept <= 2 * gap + 3);
        } else if ((double)gap * EPOCH_S > break_even_s) {
            CHECK_EQUAL(kept, 1); /* at once */
        } else {
            CHECK(kept > gap && is_about((double)kept * EPOCH_S, break_even_s));
        }
    }
}

/* What each burst needs is kept, and what only one in four does is not. */
static void test_layers(void) {
    start();
    for (int i = 0; i < 40; i++) {
        pass(epoch(i % 4 == 0 ? 200000 : 50000), 1);
        pass(epoch(0), 10);
    }
    pass(epoch(50000), 1);
    pass(epoch(0), 3);
    size_t kept = demand_peak_pages(&demand);
    CHECK(kept >= 50000 && kept < 60000);
    struct demand_forecast forecast = demand_forecast(&demand);
    CHECK_EQUAL(forecast.pages, kept);
    CHECK(is_about(forecast.unused_s, 0.3) && is_about(forecast.reuse_s, 1) && forecast.keep_s > 1);
}

/* What was in use all the time is not expected to be unused for long. */
static void test_constant_use_is_knowledge(void) {
    start();
    pass(epoch(1000), 40);
    CHECK_EQUAL(epochs_kept(1), 2);
}

/* A level that is new is no gap. */
static void test_growth_is_no_gap(void) {
    start();
    for (size_t i = 0; i < 20; i++) {
        pass(epoch(i * 1000), 1);
    }
    for (size_t i = 0; i < demand.layer_count; i++) {
        CHECK_EQUAL(demand.layers[i].gaps, 0);
    }
}

/* An epoch that no tick ended in time is a gap of its length: before what was used at its end, or after what
 * was used at its beginning. */
static void test_long_epochs(void) {
    start();
    pass(epoch(1000), 1);
    pass(epoch(0), 2);
    struct demand_epoch last = epoch(1000);
    last.ns = 20 * EPOCH_NS;
    pass(last, 1);
    CHECK(is_about((double)demand.layers[0].gaps_s[0], 2.1));
    CHECK_EQUAL(demand.layers[0].gaps, 1); /* two seconds, but not of use */
    last.used_last = 0;
    pass(last, 1);
    CHECK(is_about((double)demand.layers[0].unused_s, 1.9));
    last = epoch(0);
    last.ns = 1e18; /* 30 years */
    pass(last, 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 0);
}

/* A purge that was measured to cost a thousand times too much makes memory seem worth keeping, and so nothing
 * is purged that would show what it costs; yet it does not last. */
static void test_forgets_a_wrong_price(void) {
    start();
    struct demand_epoch last = epoch(1000);
    last.purged_pages = 1000;
    last.purge_ns = 5e8;
    pass(last, 1);
    CHECK(epochs_kept(1) < 10000);
    pass(epoch(0), 2000);
    CHECK(demand.break_even_s < 2 * break_even_s);
}

static void test_forgets_over_fork(void) {
    start();
    pass(epoch(200), 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 200);
    demand_forget(&demand);
    CHECK_EQUAL(demand_peak_pages(&demand), 0);
    pass(epoch(10), 1);
    CHECK_EQUAL(demand_peak_pages(&demand), 10);
    CHECK_EQUAL(demand.layers[0].gaps, 0);
}

/* ---- fragmentation ---- */

/* So many pages were given back, and so many were faulted in. */
static double churn(size_t purged, size_t faulted) {
    struct demand_epoch last = epoch(1000);
    last.purged_pages = purged;
    last.purge_ns = (double)purged * 500;
    last.faulted_pages = faulted;
    last.max_held = 5000;
    return demand_record(&demand, &last, price).wasted_ns;
}

static void test_fragmentation(void) {
    start();
    CHECK(churn(0, 100000) == 0 && demand_surplus_pages(&demand) == 0);
    CHECK(churn(100000, 0) == 0 && demand_surplus_pages(&demand) == 0);
    double cost = churn(0, 50000);
    CHECK(cost > 49e6 && cost < 51e6);
    size_t surplus = demand_surplus_pages(&demand);
    CHECK(surplus > 3900 && surplus <= 4000);
    CHECK_EQUAL(demand_peak_pages(&demand), 1000);
    /* A program that rests is given no respite. */
    struct demand_epoch last = epoch(0);
    last.cpu_ns = 0;
    size_t epochs = 0;
    for (; demand_surplus_pages(&demand) > 0; epochs++) {
        pass(last, 1);
        CHECK(epochs < 10);
    }
    CHECK(epochs >= 2);
    pass(epoch(0), 1);
    CHECK(demand_surplus_pages(&demand) > 0 || !demand.fragmented);
    pass(epoch(0), 1000);
    CHECK_EQUAL(demand_surplus_pages(&demand), 0);
}

/* A program that grows beyond what was kept faults, however well its pages fit. */
static void test_growth_is_no_fragmentation(void) {
    start();
    churn(50000, 0);
    struct demand_epoch last = epoch(51000);
    last.faulted_pages = 50000;
    CHECK(demand_record(&demand, &last, price).wasted_ns > 0);
    CHECK_EQUAL(demand_surplus_pages(&demand), 0);
}

/* Nor does one whose blocks would have taken clean pages in any case. */
static void test_sparse_blocks_are_no_fragmentation(void) {
    for (int sparse = 0; sparse < 2; sparse++) {
        start();
        churn(50000, 0);
        struct demand_epoch last = epoch(1000);
        last.max_held = 5000;
        last.faulted_pages = 50000;
        last.sparse_pages = sparse ? 50000 : 0;
        CHECK((demand_record(&demand, &last, price).wasted_ns == 0) == sparse);
        CHECK((demand_surplus_pages(&demand) == 0) == sparse);
    }
}

/* What was given back long ago counts the less. */
static void test_old_purges_fade(void) {
    start();
    churn(100000, 0);
    pass(epoch(0), 2500);
    CHECK(churn(0, 100000) < 1e6);
}

/* ---- the cost, to the optimum's ---- */

static uint64_t random_state = 1;

static size_t below(size_t bound) {
    return check_random(&random_state) % bound;
}

struct costs {
    double ours, optimum; /* in purges of all pages */
};

enum { LEVEL = 100000 };

/* A gap of so many epochs: what was paid for it. */
static void run_gap(struct costs *costs, size_t gap) {
    pass(epoch(LEVEL), 1);
    size_t kept = 0;
    for (size_t i = 0; i < gap; i++) {
        pass(epoch(0), 1);
        kept += demand_peak_pages(&demand) >= LEVEL;
    }
    double rent = (double)kept * EPOCH_S / break_even_s;
    bool is_purged = gap > 0 && demand_peak_pages(&demand) < LEVEL;
    costs->ours += rent + is_purged;
    double all = (double)gap * EPOCH_S / break_even_s;
    costs->optimum += all < 1 ? all : 1;
}

/* Regular gaps, gaps of any length, and of two kinds. */
static void test_expected_gaps(void) {
    for (size_t gap = 1; gap < 500; gap = gap * 3 / 2 + 1) {
        for (int kind = 0; kind < 3; kind++) {
            start();
            struct costs costs = {0};
            for (size_t i = 0; i < 100; i++) {
                run_gap(&costs, kind == 0 ? gap : kind == 1 ? gap * (i % 2 + 1) : 1 + below(2 * gap));
            }
            double ratio = costs.ours / costs.optimum;
            printf("gaps of %zu epochs, kind %d: %.2f of the optimum\n", gap, kind, ratio);
            CHECK(ratio < (kind == 2 ? 1.75 : kind == 1 ? 1.5 : 1.15) + 0.1);
        }
    }
}

/* An adversary that knows the policy chooses each gap, of a few lengths, so that it costs most: by the ratio,
 * or by the excess over 2.1 times the optimum. */
static void test_adversaries(void) {
    static struct demand saved;
    for (int kind = 0; kind < 5; kind++) {
        start();
        struct costs costs = {0};
        for (size_t i = 0; i < 2000; i++) {
            static const size_t tries[] = {1, 2, 5, 15, 29, 30, 31, 32, 33, 40, 100};
            enum { TRIES = sizeof tries / sizeof tries[0] };
            size_t worst = 1;
            double most = -1e9;
            saved = demand;
            for (size_t t = 0; t < TRIES; t++) {
                struct costs now = {0};
                run_gap(&now, tries[t]);
                demand = saved;
                /* Greedy for the ratio, or for the excess over 2.1 times the optimum's. */
                double gain = kind == 0 ? now.ours / now.optimum : now.ours - 2.1 * now.optimum;
                gain += kind == 2 ? (double)below(100) / 100 : kind == 3 ? (double)below(3) : 0;
                if (gain > most) {
                    most = gain;
                    worst = tries[t];
                }
            }
            run_gap(&costs, kind == 4 && i % 11 != 0 ? 31 : worst);
        }
        printf("adversary %d: %.3f of the optimum\n", kind, costs.ours / costs.optimum);
        CHECK(costs.ours <= 2.1 * costs.optimum + 4);
    }
}

int main(void) {
    random_state = check_seed(88172645463325252U);
    test_rents_as_long_as_buying_costs();
    test_memory_that_is_worth_nothing();
    test_a_price_that_rises();
    test_a_price_that_falls();
    test_savings();
    test_knows_a_gap_from_its_second();
    test_layers();
    test_constant_use_is_knowledge();
    test_growth_is_no_gap();
    test_long_epochs();
    test_forgets_a_wrong_price();
    test_forgets_over_fork();
    test_fragmentation();
    test_growth_is_no_fragmentation();
    test_sparse_blocks_are_no_fragmentation();
    test_old_purges_fade();
    test_expected_gaps();
    test_adversaries();
    return 0;
}
