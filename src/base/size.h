/*
 * Arithmetic on sizes and words, for all layers. Pure; any thread and any
 * signal handler may call these functions.
 */
#ifndef CALM_BASE_SIZE_H
#define CALM_BASE_SIZE_H

#include <stddef.h>
#include <stdint.h>

static inline size_t size_min(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t size_max(size_t a, size_t b) {
    return a > b ? a : b;
}

/* a - b, or 0 if b is larger. */
static inline size_t size_minus(size_t a, size_t b) {
    return a > b ? a - b : 0;
}

/* a + b, or SIZE_MAX if the sum is larger. */
static inline size_t size_plus(size_t a, size_t b) {
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

/* The next multiple of unit, which is a power of two. The caller excludes
 * overflow. */
static inline size_t size_round_up(size_t size, size_t unit) {
    return (size + unit - 1) & ~(unit - 1);
}

/* The number of bits that are set, counted in parallel for ever wider fields.
 * Compilers would call a function for it if they may not assume that the
 * processor has an instruction. */
static inline unsigned count_bits(uint64_t word) {
    word -= word >> 1 & 0x5555555555555555;
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
    return (unsigned)(word * 0x0101010101010101 >> 56);
}

#endif
