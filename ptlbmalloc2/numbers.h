/* Relaxed access to words that threads share without a lock. */
#ifndef PTLBMALLOC2_NUMBERS_H
#define PTLBMALLOC2_NUMBERS_H

#include <stdatomic.h>

#define LOAD(place)         atomic_load_explicit((place), memory_order_relaxed)
#define STORE(place, value) atomic_store_explicit((place), (value), memory_order_relaxed)
#define ADD(place, value)   ((void)atomic_fetch_add_explicit((place), (value), memory_order_relaxed))

#endif
