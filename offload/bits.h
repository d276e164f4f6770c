/* Sets of small numbers, in words of 64 bits. One thread at a time. */
#ifndef CALM_OFFLOAD_BITS_H
#define CALM_OFFLOAD_BITS_H

#include <stdint.h>

#define BITS_WORDS(count) (((count) + 63) / 64)

static inline void bits_set(uint64_t *words, uint32_t bit) {
    words[bit / 64] |= (uint64_t)1 << (bit % 64);
}

static inline void bits_clear(uint64_t *words, uint32_t bit) {
    words[bit / 64] &= ~((uint64_t)1 << (bit % 64));
}

/* The lowest number from `from` on in a set of numbers below count; count if
 * there is none. */
static inline uint32_t bits_next(const uint64_t *words, uint32_t from, uint32_t count) {
    for (; from < count; from = (from | 63) + 1) {
        uint64_t rest = words[from / 64] >> (from % 64);
        if (rest != 0) {
            return from + (uint32_t)__builtin_ctzll(rest);
        }
    }
    return count;
}

#endif
