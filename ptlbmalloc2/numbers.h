/* Relaxed access to words that threads share without a lock, and the smaller and larger of two numbers. */
#ifndef PTLBMALLOC2_NUMBERS_H
#define PTLBMALLOC2_NUMBERS_H

#include <stdatomic.h>
#include <stddef.h>

#define LOAD(place)         atomic_load_explicit((place), memory_order_relaxed)
#define STORE(place, value) atomic_store_explicit((place), (value), memory_order_relaxed)
#define ADD(place, value)   ((void)atomic_fetch_add_explicit((place), (value), memory_order_relaxed))

static inline size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

static inline size_t larger(size_t a, size_t b) {
    return a > b ? a : b;
}

#endif
