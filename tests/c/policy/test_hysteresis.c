/* The policy compared with table 1 and section 6.2.1 of "Ptlbmalloc2". */
#include "policy/hysteresis.h"

#include <float.h>
#include <math.h>
#include <stdint.h>

#include "check.h"

static struct hysteresis_thresholds decide(size_t footprint, double cpus, size_t arenas, double sensitivity) {
    return hysteresis_decide((struct hysteresis_input){
        .footprint_bytes = footprint, .cpus_used = cpus, .arenas = arenas, .sensitivity = sensitivity});
}

static size_t trim(size_t footprint, double cpus, double sensitivity) {
    return decide(footprint, cpus, 1, sensitivity).trim_bytes;
}

/* Equal but for the rounding of a factor that has no exact double. */
static int near(size_t a, size_t b) {
    return a <= b + 1 && b <= a + 1;
}

static void test_table_1(void) {
    CHECK_EQUAL(hysteresis_base_bytes(0), 100000);
    CHECK_EQUAL(hysteresis_base_bytes(1), 100000);
    CHECK_EQUAL(hysteresis_base_bytes(499999), 100000);
    CHECK_EQUAL(hysteresis_base_bytes(500000), 250000);
    CHECK_EQUAL(hysteresis_base_bytes(999999), 499999);
    CHECK_EQUAL(hysteresis_base_bytes(1000000), 500000);
    CHECK_EQUAL(hysteresis_base_bytes(10000000), 1400000);
    CHECK_EQUAL(hysteresis_base_bytes(999999999), 100399999);
    CHECK_EQUAL(hysteresis_base_bytes(1000000000), 100000000);
    CHECK_EQUAL(hysteresis_base_bytes(1000000000000), 100000000);
    CHECK_EQUAL(hysteresis_base_bytes(SIZE_MAX), 100000000);
}

static void test_cpu_factor(void) {
    CHECK_EQUAL(trim(0, 0, 1), 100000);
    CHECK(near(trim(0, 1, 1), 101000));
    CHECK(near(trim(0, 2.5, 1), 102500));
    CHECK(near(trim(0, 64, 1), 164000));
    CHECK(near(trim(SIZE_MAX, 64, 1), 164000000));
    CHECK_EQUAL(trim(0, 100, 1), 200000);
    CHECK_EQUAL(trim(0, -1, 1), 100000);
    CHECK_EQUAL(trim(0, -DBL_MAX, 1), 100000);
    CHECK_EQUAL(trim(0, (double)-INFINITY, 1), 100000);
    CHECK_EQUAL(trim(0, (double)NAN, 1), 100000);
}

static void test_sensitivity(void) {
    CHECK_EQUAL(trim(0, 0, 0.5), 50000);
    CHECK_EQUAL(trim(500000, 0, 0.5), 125000);
    CHECK_EQUAL(trim(0, 0, 1), 100000);
    CHECK_EQUAL(trim(0, 0, 100), 10000000);
    CHECK_EQUAL(trim(0, 100, 100), 20000000);
    CHECK_EQUAL(trim(0, 0, 0), 100000);
    CHECK_EQUAL(trim(0, 0, -1), 100000);
    CHECK_EQUAL(trim(0, 0, (double)-INFINITY), 100000);
    CHECK_EQUAL(trim(0, 0, (double)NAN), 100000);
    CHECK_EQUAL(trim(0, 0, DBL_MIN), 0);
}

static void test_saturation(void) {
    CHECK_EQUAL(trim(SIZE_MAX, 0, 1e30), PTRDIFF_MAX);
    CHECK_EQUAL(trim(SIZE_MAX, 0, DBL_MAX), PTRDIFF_MAX);
    CHECK_EQUAL(trim(SIZE_MAX, DBL_MAX, DBL_MAX), PTRDIFF_MAX);
    CHECK_EQUAL(trim(0, (double)INFINITY, 1), PTRDIFF_MAX);
    /* 100 MB times 2^37 is 2^63 and more; one factor of two less still fits. */
    double doubled = 0x1p37;
    CHECK_EQUAL(trim(SIZE_MAX, 0, doubled), PTRDIFF_MAX);
    CHECK_EQUAL(trim(SIZE_MAX, 0, doubled / 2), (size_t)100000000 << 36);
    CHECK_EQUAL(decide(SIZE_MAX, 0, 1, DBL_MAX).pad_each_bytes, PTRDIFF_MAX / 4);
    CHECK_EQUAL(decide(SIZE_MAX, 0, 3, DBL_MAX).pad_each_bytes, PTRDIFF_MAX / 4 / 3);
}

static void test_padding(void) {
    static const size_t footprints[] = {0, 500000, 1000000, 123456789, 1000000000, SIZE_MAX};
    static const size_t arenas[] = {1, 2, 3, 7, 64, 8192};
    for (size_t i = 0; i < sizeof footprints / sizeof footprints[0]; i++) {
        for (size_t j = 0; j < sizeof arenas / sizeof arenas[0]; j++) {
            struct hysteresis_thresholds got = decide(footprints[i], 0, arenas[j], 1);
            CHECK_EQUAL(got.trim_bytes, hysteresis_base_bytes(footprints[i]));
            CHECK_EQUAL(got.pad_each_bytes, got.trim_bytes / 4 / arenas[j]);
        }
    }
    CHECK_EQUAL(decide(0, 0, 0, 1).pad_each_bytes, decide(0, 0, 1, 1).pad_each_bytes);
    CHECK_EQUAL(decide(0, 0, SIZE_MAX, 1).pad_each_bytes, 0);
}

int main(void) {
    test_table_1();
    test_cpu_factor();
    test_sensitivity();
    test_saturation();
    test_padding();
    return 0;
}
