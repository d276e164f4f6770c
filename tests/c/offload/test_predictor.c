/*
 * The predictor: it doubles with each miss, decreases by what was prepared in vain, and forgets classes
 * without requests.
 */
#include "offload/predictor.h"

#include "check.h"

#define MOST 8

static uint32_t least(uint32_t a, uint32_t b) {
    return a < b ? a : b;
}

static void test_nothing_is_expected(void) {
    struct predictor predictor = {0};
    CHECK(predictor.target == 0);
    CHECK_EQUAL(predictor_end_epoch(&predictor, 0), 0);
    CHECK(predictor.target == 0);
}

static void test_doubles_with_each_miss(void) {
    for (uint32_t most = 1; most <= MOST; most++) {
        struct predictor predictor = {0};
        uint32_t expected = PREDICTOR_FIRST;
        for (int miss = 0; miss < 6; miss++) {
            predictor_missed(&predictor, most);
            CHECK_EQUAL(predictor.target, least(expected, most));
            CHECK(predictor.target > 0);
            expected *= 2;
        }
    }
}

/* However large the numbers. */
static void test_does_not_overflow(void) {
    struct predictor predictor = {0};
    for (int miss = 0; miss < 100; miss++) {
        predictor_missed(&predictor, UINT16_MAX);
    }
    CHECK_EQUAL(predictor.target, UINT16_MAX);
    for (uint32_t i = 0; i < 2 * UINT16_MAX; i++) {
        predictor_took(&predictor, 3);
    }
    CHECK(predictor.wanted);
    CHECK(predictor.target > 0);
}

/* Within an epoch the smallest number of ready magazines counts; a miss sets it to zero. */
static void test_falls_by_what_lay_ready_throughout(void) {
    struct predictor predictor = {.target = 8, .lowest = 8};
    predictor_took(&predictor, 7);
    predictor_took(&predictor, 5);
    predictor_took(&predictor, 6);
    CHECK_EQUAL(predictor_end_epoch(&predictor, 8), 5);
    CHECK_EQUAL(predictor.target, 3);
    /* The next epoch begins with what is left. */
    CHECK_EQUAL(predictor.lowest, 3);
    predictor_took(&predictor, 2);
    predictor_missed(&predictor, MOST);
    CHECK_EQUAL(predictor.target, 6);
    CHECK_EQUAL(predictor_end_epoch(&predictor, 6), 0);
    CHECK_EQUAL(predictor.target, 6);
}

/* Who takes at all keeps one ready, and no more than are there go back. */
static void test_one_stays_while_any_is_wanted(void) {
    struct predictor predictor = {.target = 4, .lowest = 4};
    predictor_took(&predictor, 4);
    CHECK_EQUAL(predictor_end_epoch(&predictor, 4), 3);
    CHECK_EQUAL(predictor.target, 1);
    predictor_took(&predictor, 1);
    CHECK_EQUAL(predictor_end_epoch(&predictor, 0), 0);
    CHECK_EQUAL(predictor.target, 1);
    CHECK(predictor.target > 0);
}

static void test_quiet_after_an_epoch_without_demand(void) {
    for (uint32_t ready = 0; ready <= MOST; ready++) {
        struct predictor predictor = {0};
        for (int miss = 0; miss < 4; miss++) {
            predictor_missed(&predictor, MOST);
        }
        predictor_end_epoch(&predictor, ready);
        CHECK(predictor.target > 0);
        CHECK_EQUAL(predictor_end_epoch(&predictor, ready), ready);
        CHECK(predictor.target == 0);
        CHECK_EQUAL(predictor.lowest, 0);
        /* As new. */
        predictor_missed(&predictor, MOST);
        CHECK_EQUAL(predictor.target, PREDICTOR_FIRST);
    }
}

/* From any state: no more goes back than is ready, and the target stays within its bound and what is wanted.
 */
static void test_every_state(void) {
    for (uint32_t target = 0; target <= MOST; target++) {
        for (uint32_t lowest = 0; lowest <= MOST; lowest++) {
            for (uint32_t wanted = 0; wanted <= 1; wanted++) {
                for (uint32_t ready = 0; ready <= MOST; ready++) {
                    struct predictor predictor = {(uint16_t)target, (uint16_t)lowest, wanted != 0};
                    uint32_t surplus = predictor_end_epoch(&predictor, ready);
                    CHECK(surplus <= ready);
                    CHECK(wanted == 0 || surplus <= lowest ||
                          (predictor.target == 1 && ready - surplus == 1));
                    CHECK_EQUAL(predictor.target == 0, wanted == 0);
                    CHECK(predictor.target <= (target > 1 ? target : 1));
                    CHECK_EQUAL(predictor.lowest, ready - surplus);
                    CHECK(!predictor.wanted);
                }
            }
        }
    }
}

/* A client that takes k magazines between two feedings, over and over: from some point on none is missed. */
static void test_converges(void) {
    for (uint32_t each = 1; each <= MOST; each++) {
        struct predictor predictor = {0};
        uint32_t missed = 0;
        for (int epoch = 0; epoch < 10; epoch++) {
            missed = 0;
            for (int round = 0; round < 4; round++) {
                uint32_t ready = predictor.target; /* fed */
                for (uint32_t i = 0; i < each; i++) {
                    if (ready == 0) {
                        predictor_missed(&predictor, MOST);
                        missed++;
                    } else {
                        predictor_took(&predictor, --ready);
                    }
                }
            }
            predictor_end_epoch(&predictor, predictor.target);
        }
        CHECK_EQUAL(missed, 0);
        CHECK(predictor.target >= each && predictor.target <= 2 * each);
    }
}

int main(void) {
    test_nothing_is_expected();
    test_doubles_with_each_miss();
    test_does_not_overflow();
    test_falls_by_what_lay_ready_throughout();
    test_one_stays_while_any_is_wanted();
    test_quiet_after_an_epoch_without_demand();
    test_every_state();
    test_converges();
    return 0;
}
