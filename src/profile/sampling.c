#include "profile/sampling.h"

#define LN_2 0.69314718055994530942

/* The functions use series that are exact to twelve digits, since the math
 * library is not a part of libc. */

/* Returns -ln(x) for x in (0, 1]. */
static double minus_ln(double x) {
    int halvings = 0;
    while (x < 0.5) {
        x *= 2;
        halvings++;
    }
    /* ln(x) = 2 atanh((x - 1) / (x + 1)). The argument of atanh is at most a
     * third here. */
    double t = (x - 1) / (x + 1);
    double sum = 0;
    for (int power = 23; power >= 1; power -= 2) {
        sum = sum * t * t + 1.0 / power;
    }
    return halvings * LN_2 - 2 * t * sum;
}

/* Returns 1 - exp(-x) for x >= 0. There is no cancellation near zero, where
 * small blocks are. */
static double one_minus_exp(double x) {
    if (x > 40) {
        return 1;
    }
    int doublings = 0;
    while (x > 0.5) {
        x /= 2;
        doublings++;
    }
    double sum = 1;
    for (int n = 14; n >= 2; n--) {
        sum = 1 - x / n * sum;
    }
    double part = x * sum;
    /* Computes 1 - exp(-2x) from 1 - exp(-x). */
    while (doublings-- > 0) {
        part = part * (2 - part);
    }
    return part;
}

int64_t sampling_gap(uint64_t random, uint64_t mean_bytes) {
    double uniform = ((double)(random >> 11) + 1) / (double)((uint64_t)1 << 53);
    return 1 + (int64_t)(minus_ln(uniform) * (double)mean_bytes);
}

struct sample_weight sampling_weight(uint64_t size, uint64_t mean_bytes) {
    double stands_for = 1 / one_minus_exp((double)size / (double)mean_bytes);
    return (struct sample_weight){
        .count = (uint64_t)(stands_for * SAMPLE_COUNT_UNIT + 0.5),
        .bytes = (uint64_t)(stands_for * (double)size + 0.5),
    };
}
