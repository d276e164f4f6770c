/*
 * The overflow stack: freed blocks for which a ring had no room, or that a thread freed which forks and
 * has entered all endpoints. A stack of pointers in memory of its own, since freed blocks hold no metadata.
 * Any thread pushes; the server pops.
 */
#ifndef CALM_OFFLOAD_OVERFLOW_H
#define CALM_OFFLOAD_OVERFLOW_H

#include "os/address_range.h"
#include "os/lock.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct overflow {
    struct lock lock;
    _Atomic(size_t) count;       /* changes under the lock */
    size_t peak;                 /* of count, since the memory was last given back to the system */
    struct address_range region; /* reserved by the owner */
};

/* False, without effect, if there is no room for all of them. */
bool overflow_push(struct overflow *overflow, void *const *blocks, size_t count);

/* Pops up to max_count blocks, the latest; returns how many. 0 also while another thread pushes: that thread
 * wakes the server afterwards. */
size_t overflow_pop(struct overflow *overflow, void **blocks, size_t max_count);

/* A sequentially consistent load, for the server's check before it sleeps. */
static inline bool overflow_is_empty(const struct overflow *overflow) {
    return atomic_load_explicit(&overflow->count, memory_order_seq_cst) == 0;
}

#endif
