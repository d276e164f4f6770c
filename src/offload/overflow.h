/*
 * The overflow: freed blocks that found no room in a ring, or no server. A stack of pointers in memory of its
 * own, as freed blocks hold nothing of ours. Any thread pushes; the server pops.
 */
#ifndef CALM_OFFLOAD_OVERFLOW_H
#define CALM_OFFLOAD_OVERFLOW_H

#include "os/address_space.h"
#include "os/lock.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

struct overflow {
    struct lock lock;
    _Atomic(size_t) count; /* changes under the lock */
    size_t most;           /* count's, since what lay there was given back to the system */
    struct os_region region;
};

/* Reserves address space for most blocks. False if there is none. */
bool overflow_init(struct overflow *overflow, size_t blocks_most);

/* False, and nothing changed, if there is no room. */
bool overflow_push(struct overflow *overflow, void *const *blocks, size_t count);

/* The latest, most at most; returns how many: none also while another thread pushes, who wakes the server
 * afterwards. */
size_t overflow_pop(struct overflow *overflow, void **blocks, size_t most);

/* Ordered by seq_cst after what the caller wrote before it. */
static inline bool overflow_is_empty(const struct overflow *overflow) {
    return atomic_load_explicit(&overflow->count, memory_order_seq_cst) == 0;
}

#endif
