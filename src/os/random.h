/*
 * Pseudorandom numbers: a mixing function for hashes and sequences, and a seed.
 * They protect no secret, since an attacker can guess them.
 *
 * The functions are thread-safe, preserve errno, and allocate nothing.
 */
#ifndef CALM_OS_RANDOM_H
#define CALM_OS_RANDOM_H

#include <stdint.h>

/* 2^64 divided by the golden ratio. As fractions of 2^64, any n consecutive
 * multiples of it stay apart: the two nearest are more than 0.38 / n apart
 * (Sos, 1958). Therefore it is the factor of Fibonacci hashing (Knuth, volume
 * 3, 6.4) and the increment of SplitMix64. */
#define RANDOM_GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/* The finalizer of SplitMix64 (Steele, Lea and Flood, 2014). It is one to one,
 * and every bit of the result depends on every bit of the number. SplitMix64 is
 * random_mix of a counter that grows by RANDOM_GOLDEN_RATIO. */
static inline uint64_t random_mix(uint64_t number) {
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ULL;
    number = (number ^ number >> 27) * 0x94d049bb133111ebULL;
    return number ^ number >> 31;
}

/* Returns a seed, which differs from process to process and from call to call.
 * A child of fork gets another seed than its parent. */
uint64_t random_process_seed(void);

#endif
