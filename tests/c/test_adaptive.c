/* The adaptive policy alone: the band's bounds, what widens and narrows it, and what lay unused. */
#include "policy/adaptive.h"

#include <math.h>
#include <stdint.h>

#include "check.h"

#define WINDOW_NS 1e8

static struct adaptive_window quiet(void) {
    return (struct adaptive_window){.ns = WINDOW_NS,
                                    .cpus_used = 1,
                                    .fault_ns = 500,
                                    .band_most = ADAPTIVE_BAND_MOST,
                                    .cost_share = 0.01};
}

/* All of what was given back was wanted again, and cost so many ns. */
static struct adaptive_window in_vain(double cost_ns) {
    struct adaptive_window window = quiet();
    window.purge_ns = cost_ns;
    window.fault_ns = 0;
    window.purged_pages = window.reused_pages = 100;
    return window;
}

static double next_band(double band, struct adaptive_window window) {
    return adaptive_decide(band, window).band;
}

static void test_widens_to_the_most(void) {
    for (double most = ADAPTIVE_BAND_MOST; most <= ADAPTIVE_BAND_MOST_TENDED; most *= 2) {
        struct adaptive_window window = in_vain(WINDOW_NS / 50);
        window.band_most = most;
        double band = ADAPTIVE_BAND_LEAST;
        for (double wanted = 2; wanted <= most; wanted *= 2) {
            band = next_band(band, window);
            CHECK(band == wanted);
        }
        CHECK(next_band(band, window) == most);
        CHECK(next_band(most * 0.75, window) == most);
    }
}

static void test_narrows_to_the_least(void) {
    double band = ADAPTIVE_BAND_MOST_TENDED;
    struct adaptive_window window = quiet();
    window.band_most = ADAPTIVE_BAND_MOST_TENDED;
    for (int windows = 0; windows < 16; windows++) {
        double narrower = next_band(band, window);
        CHECK(narrower == (band * 7 / 8 > ADAPTIVE_BAND_LEAST ? band * 7 / 8 : ADAPTIVE_BAND_LEAST));
        band = narrower;
    }
    CHECK(band == ADAPTIVE_BAND_LEAST);
    CHECK(next_band(band, window) == ADAPTIVE_BAND_LEAST);
}

/* One hundredth of one CPU is a millisecond of each window: above it is too much, below a quarter of it is
 * little. */
static void test_edges(void) {
    CHECK(next_band(2, in_vain(1.01e6)) == 4);
    CHECK(next_band(2, in_vain(0.99e6)) == 2);
    CHECK(next_band(2, in_vain(0.26e6)) == 2);
    CHECK(next_band(2, in_vain(0.24e6)) == 1.75);

    struct adaptive_window four = in_vain(1.01e6);
    four.cpus_used = 4;
    CHECK(next_band(2, four) == 2);
    four.cost_share = 0.0025;
    CHECK(next_band(2, four) == 4);
}

/* What was given back and stayed away cost nothing in vain. */
static void test_only_what_was_in_vain_counts(void) {
    struct adaptive_window window = in_vain(WINDOW_NS);
    window.reused_pages = 0;
    CHECK(next_band(2, window) == 1.75);
    window.reused_pages = 2; /* a fiftieth of it */
    CHECK(next_band(2, window) == 4);
    window.purge_ns = 0.5e6 * 50;
    CHECK(next_band(2, window) == 2);
    /* More than was given back in this window: from an earlier one, at no more than the whole price. */
    window = in_vain(0.9e6);
    window.reused_pages = 100000;
    CHECK(next_band(2, window) == 2);
    /* Faults count in any case, also of what an earlier window gave back. */
    window.purged_pages = 0;
    window.purge_ns = 0;
    window.fault_ns = 9; /* of 100,000 pages: 0.9 ms */
    CHECK(next_band(2, window) == 2);
    window.fault_ns = 11;
    CHECK(next_band(2, window) == 4);
}

static void test_unused_pages(void) {
    struct adaptive_window window = quiet();
    for (size_t pages = 0; pages < 100; pages++) {
        window.unused_pages = pages;
        CHECK_EQUAL(adaptive_decide(1, window).purge_pages, pages < 16 ? 0 : pages);
    }
    window.unused_pages = SIZE_MAX;
    CHECK_EQUAL(adaptive_decide(1, window).purge_pages, SIZE_MAX);
    /* Whatever the band does. */
    window = in_vain(WINDOW_NS);
    window.unused_pages = 1000;
    CHECK_EQUAL(adaptive_decide(1, window).purge_pages, 1000);
}

/* Windows without length, without CPU time, and with CPU time that nobody knows. */
static void test_nothing_known(void) {
    struct adaptive_window window = {0};
    window.band_most = ADAPTIVE_BAND_MOST;
    struct adaptive_decision decision = adaptive_decide(3, window);
    CHECK(decision.band == 3 && decision.purge_pages == 0);

    double strange[] = {0, -1, -INFINITY, NAN};
    for (size_t i = 0; i < sizeof strange / sizeof strange[0]; i++) {
        /* Counts as a tenth of a CPU: too much is a tenth of a millisecond. */
        window = in_vain(0.11e6);
        window.cpus_used = strange[i];
        CHECK(next_band(2, window) == 4);
        window = in_vain(0.09e6);
        window.cpus_used = strange[i];
        CHECK(next_band(2, window) == 2);
        window = quiet();
        window.cpus_used = strange[i];
        CHECK(next_band(2, window) == 1.75);
    }
    /* No share at all: nothing is cheap, and everything is too dear. */
    window = quiet();
    window.cost_share = 0;
    CHECK(next_band(2, window) == 2);
    window = in_vain(1);
    window.cost_share = 0;
    CHECK(next_band(2, window) == 4);
}

/* Whatever the numbers: within the bounds, and never narrower for a higher cost. */
static void test_all_combinations(void) {
    static const double times[] = {0, 1, 1e5, 1e6, 1e7, 1e9, 1e12};
    static const double cpus[] = {-1, 0, 0.05, 1, 64, 1e6};
    static const double shares[] = {0, 0.01, 1};
    static const size_t pages[] = {0, 1, 15, 16, 1000, (size_t)1 << 40, SIZE_MAX};
    for (size_t i = 0; i < 7 * 6 * 3 * 7 * 7; i++) {
        double band_before = 0;
        for (size_t purge = 0; purge < 7; purge++) {
            struct adaptive_window window = {
                .ns = times[i % 7],
                .cpus_used = cpus[i / 7 % 6],
                .cost_share = shares[i / 42 % 3],
                .purged_pages = pages[i / 126 % 7],
                .reused_pages = pages[i / 882 % 7],
                .purge_ns = times[purge],
                .fault_ns = 700,
                .unused_pages = pages[purge],
                .band_most = i % 2 == 0 ? ADAPTIVE_BAND_MOST : ADAPTIVE_BAND_MOST_TENDED,
            };
            double start = 1 + (double)(i % 13) / 12 * (window.band_most - 1);
            struct adaptive_decision decision = adaptive_decide(start, window);
            CHECK(isfinite(decision.band));
            CHECK(decision.band >= ADAPTIVE_BAND_LEAST && decision.band <= window.band_most);
            CHECK(decision.band >= band_before);
            CHECK(decision.purge_pages == 0 || decision.purge_pages == window.unused_pages);
            band_before = decision.band;
        }
    }
}

int main(void) {
    test_widens_to_the_most();
    test_narrows_to_the_least();
    test_edges();
    test_only_what_was_in_vain_counts();
    test_unused_pages();
    test_nothing_known();
    test_all_combinations();
    return 0;
}
