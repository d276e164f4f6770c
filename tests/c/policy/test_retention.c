/* Retention in isolation: the effect of each term on the limit, which never exceeds the lowest of them. */
#include "policy/retention.h"

#include "policy/hysteresis.h"

#include "check.h"

#include <stdint.h>

#define MIB ((size_t)1 << 20)

/* 200 MiB of which 100 are free: the threshold is a tenth and 400 kB. */
static struct retention_terms half_free(void) {
    return (struct retention_terms){
        .adaptive = true,
        .background_purge = true,
        .factor = hysteresis_factor(1, 1),
        .available_bytes = SIZE_MAX,
    };
}

static size_t used = 100 * MIB, free_now = 100 * MIB;

static size_t threshold_of(struct retention_terms in) {
    size_t threshold = retention_threshold(&in, used, free_now);
    CHECK_EQUAL(threshold, hysteresis_decide((struct hysteresis_input){used + free_now, 1, 1, 1}).trim_bytes);
    return threshold;
}

static size_t limit_of(struct retention_terms in) {
    struct retention retention = retention_decide(&in, used, free_now);
    CHECK(retention.keep_bytes <= retention.limit_bytes);
    return retention.limit_bytes;
}

static void test_paper(void) {
    struct retention_terms in = half_free();
    in.adaptive = false;
    in.peak_bytes = 1000 * MIB;
    in.available_bytes = 0;
    struct retention retention = retention_decide(&in, used, free_now);
    CHECK_EQUAL(retention.limit_bytes, threshold_of(in));
    CHECK_EQUAL(retention.keep_bytes, threshold_of(in) / 4);
}

static void test_peak(void) {
    struct retention_terms in = half_free();
    CHECK_EQUAL(limit_of(in), threshold_of(in));
    in.peak_bytes = 50 * MIB; /* less than is in use now */
    CHECK_EQUAL(limit_of(in), threshold_of(in));
    in.peak_bytes = 150 * MIB;
    CHECK_EQUAL(limit_of(in), threshold_of(in) + 50 * MIB);
    CHECK_EQUAL(retention_decide(&in, used, free_now).keep_bytes, limit_of(in) - threshold_of(in) / 4);
    in.factor = 0; /* memory is worth nothing */
    CHECK_EQUAL(limit_of(in), 0);
}

/* What fragmentation needs is kept, but does not feed itself without end. */
static void test_surplus(void) {
    struct retention_terms in = half_free();
    in.peak_bytes = 150 * MIB;
    in.surplus_bytes = 10 * MIB;
    CHECK_EQUAL(limit_of(in), threshold_of(in) + 60 * MIB);
    for (int epoch = 0; epoch < 1000; epoch++) {
        free_now = limit_of(in);
        in.surplus_bytes = free_now - 50 * MIB;
    }
    CHECK_EQUAL(limit_of(in), retention_prefault_bytes(&in, used, free_now) + 50 * MIB);
    CHECK(free_now < 300 * MIB);
    free_now = 100 * MIB;
}

static void test_foreground(void) {
    struct retention_terms in = half_free();
    in.peak_bytes = 1000 * MIB;
    in.background_purge = false;
    CHECK_EQUAL(limit_of(in), RETENTION_FOREGROUND_FACTOR * threshold_of(in));
    CHECK_EQUAL(retention_prefault_bytes(&in, used, free_now), limit_of(in));
    /* Little is as well kept as given back. */
    used = 1000;
    free_now = 100000;
    CHECK_EQUAL(limit_of(in), RETENTION_FOREGROUND_BYTES);
    in.peak_bytes = MIB;
    CHECK_EQUAL(limit_of(in), threshold_of(in) + MIB - 1000);
    used = free_now = 100 * MIB;
}

static void test_room(void) {
    struct retention_terms in = half_free();
    in.peak_bytes = 1000 * MIB;
    in.available_bytes = 400 * MIB;
    CHECK_EQUAL(limit_of(in), 100 * MIB);
    in.available_bytes = 100 * MIB;
    CHECK_EQUAL(limit_of(in), 0);
    in.available_bytes = 0;
    CHECK_EQUAL(limit_of(in), 0);
}

/* Whatever the numbers are, nothing wraps. */
static void test_extremes(void) {
    static const size_t sizes[] = {0, 1, 4096, MIB, (size_t)1 << 40, SIZE_MAX / 2, SIZE_MAX};
    static const double factors[] = {0, 0.01, 1, 100};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    for (size_t i = 0; i < (size_t)SIZES * SIZES * SIZES * SIZES * 4 * 2; i++) {
        size_t n = i;
        struct retention_terms in = {.adaptive = true};
        used = sizes[n % SIZES], n /= SIZES;
        free_now = sizes[n % SIZES], n /= SIZES;
        in.peak_bytes = sizes[n % SIZES], n /= SIZES;
        in.available_bytes = sizes[n % SIZES], n /= SIZES;
        in.factor = factors[n % 4];
        n /= 4;
        in.background_purge = n % 2 == 0;
        size_t limit = limit_of(in);
        size_t room = in.available_bytes > used ? in.available_bytes - used : 0;
        CHECK(in.available_bytes == SIZE_MAX || limit <= room);
        CHECK(in.background_purge || limit <= RETENTION_FOREGROUND_BYTES ||
              limit <= retention_prefault_bytes(&in, used, free_now));
    }
}

/* How much is free may be unknown only where the limit and the memory in use add up to the same for each part
 * of what is held. */
static void test_held(void) {
    struct retention_terms in = half_free();
    in.peak_bytes = 150 * MIB;
    in.surplus_bytes = 3 * MIB;
    CHECK(retention_limits_held(&in, 200 * MIB));
    size_t sum = retention_decide(&in, 0, 200 * MIB).limit_bytes;
    for (size_t part = 0; part <= 150 * MIB; part += MIB) {
        CHECK_EQUAL(part + retention_decide(&in, part, 200 * MIB - part).limit_bytes, sum);
    }
    in.available_bytes = 3 * sum;
    CHECK(!retention_limits_held(&in, 200 * MIB));
    in.available_bytes = SIZE_MAX;
    in.background_purge = false;
    CHECK(!retention_limits_held(&in, 200 * MIB));
    in.background_purge = true;
    in.factor = 0;
    CHECK(!retention_limits_held(&in, 200 * MIB));
    in.factor = 1;
    in.adaptive = false;
    CHECK(!retention_limits_held(&in, 200 * MIB));
}

int main(void) {
    test_paper();
    test_peak();
    test_surplus();
    test_foreground();
    test_room();
    test_extremes();
    test_held();
    return 0;
}
