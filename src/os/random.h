/*
 * Pseudorandom numbers: a mixing function for hashes and sequences, and a seed. No secrets: nothing here
 * withstands an attacker who guesses.
 *
 * Thread-safe; preserves errno; allocates nothing.
 */
#ifndef CALM_OS_RANDOM_H
#define CALM_OS_RANDOM_H

#include <stdint.h>

/*
 * 2^64 by the golden ratio. Multiples of it, as fractions of 2^64, stay apart from each other, however many
 * follow each other (Sos, 1958: of n in a row the nearest two are more than 0.38 / n apart). Therefore it is
 * the factor of Fibonacci hashing (Knuth, volume 3, 6.4) and SplitMix64's increment.
 */
#define RANDOM_GOLDEN_RATIO 0x9e3779b97f4a7c15ULL

/* SplitMix64's finalizer (Steele, Lea and Flood, 2014): one to one, and every bit of the result depends on
 * every bit of the number. SplitMix64 is random_mix of a counter that grows by RANDOM_GOLDEN_RATIO. */
static inline uint64_t random_mix(uint64_t number) {
    number = (number ^ number >> 30) * 0xbf58476d1ce4e5b9ULL;
    number = (number ^ number >> 27) * 0x94d049bb133111ebULL;
    return number ^ number >> 31;
}

/* Differs from process to process, and from call to call: a child of fork gets another one than its parent.
 */
uint64_t random_process_seed(void);

#endif
