/*
 * Arithmetic on sizes and words that every part needs. Pure; any thread and signal handler.
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

/* a + b, or SIZE_MAX if that is too large. */
static inline size_t size_plus(size_t a, size_t b) {
    return a > SIZE_MAX - b ? SIZE_MAX : a + b;
}

/* To a multiple of unit, a power of two. The caller excludes overflow. */
static inline size_t size_round_up(size_t size, size_t unit) {
    return (size + unit - 1) & ~(unit - 1);
}

/* How many bits are set, in parallel for ever wider fields. Compilers call a function for it where they may
 * not assume that the processor has an instruction. */
static inline unsigned count_bits(uint64_t word) {
    word -= word >> 1 & 0x5555555555555555;
    word = (word & 0x3333333333333333) + (word >> 2 & 0x3333333333333333);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0f;
    return (unsigned)(word * 0x0101010101010101 >> 56);
}

#endif
