#include "offload/overflow.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/purge.h"

#include <string.h>

/* What an empty stack keeps. */
#define MAX_KEPT_BYTES ((size_t)64 << 10)

bool overflow_push(struct overflow *overflow, void *const *blocks, size_t count) {
    lock_acquire(&overflow->lock);
    size_t held = atomic_load_explicit(&overflow->count, memory_order_relaxed);
    bool room = address_range_reach(&overflow->region, (held + count) * sizeof *blocks);
    if (room) {
        calm_assert(count > 0 && (held + count) * sizeof *blocks <= overflow->region.committed, held, count);
        memcpy((void **)(void *)overflow->region.base + held, blocks, count * sizeof *blocks);
        atomic_store_explicit(&overflow->count, held + count, memory_order_seq_cst);
        overflow->peak = size_max(overflow->peak, held + count);
    }
    lock_release(&overflow->lock);
    return room;
}

size_t overflow_pop(struct overflow *overflow, void **blocks, size_t max_count) {
    if (atomic_load_explicit(&overflow->count, memory_order_relaxed) == 0 || !lock_try(&overflow->lock)) {
        return 0;
    }
    size_t held = atomic_load_explicit(&overflow->count, memory_order_relaxed);
    size_t taken = size_min(held, max_count);
    calm_assert(held <= overflow->peak, held, overflow->peak);
    memcpy(blocks, (void **)(void *)overflow->region.base + (held - taken), taken * sizeof *blocks);
    atomic_store_explicit(&overflow->count, held - taken, memory_order_relaxed);
    if (taken == held && overflow->peak * sizeof(void *) > MAX_KEPT_BYTES) {
        const struct iovec all = {overflow->region.base, overflow->region.committed};
        purge_ranges(&all, 1);
        overflow->peak = 0;
    }
    lock_release(&overflow->lock);
    return taken;
}
