/*
 * Arithmetic on sizes that every part needs. Pure; any thread and signal handler.
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

#endif
