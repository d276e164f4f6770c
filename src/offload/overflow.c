#include "offload/overflow.h"

#include "os/purge.h"

#include <string.h>

#define KEPT_BYTES ((size_t)64 << 10)

bool overflow_init(struct overflow *overflow, size_t blocks_most) {
    size_t page = os_page_size();
    size_t bytes = (blocks_most * sizeof(void *) + page - 1) & ~(page - 1);
    overflow->region = (struct os_region){.base = os_reserve(bytes, page), .reserved = bytes};
    return overflow->region.base != NULL;
}

bool overflow_push(struct overflow *overflow, void *const *blocks, size_t count) {
    lock_acquire(&overflow->lock);
    size_t held = atomic_load_explicit(&overflow->count, memory_order_relaxed);
    bool room = os_region_reach(&overflow->region, (held + count) * sizeof *blocks);
    if (room) {
        memcpy((void **)(void *)overflow->region.base + held, blocks, count * sizeof *blocks);
        atomic_store_explicit(&overflow->count, held + count, memory_order_seq_cst);
        overflow->most = overflow->most > held + count ? overflow->most : held + count;
    }
    lock_release(&overflow->lock);
    return room;
}

/* Once it is empty it costs little again. Under the lock. */
static void give_back(struct overflow *overflow) {
    if (overflow->most * sizeof(void *) > KEPT_BYTES) {
        const struct iovec all = {overflow->region.base, overflow->region.committed};
        purge_ranges(&all, 1);
        overflow->most = 0;
    }
}

size_t overflow_pop(struct overflow *overflow, void **blocks, size_t most) {
    if (atomic_load_explicit(&overflow->count, memory_order_relaxed) == 0 || !lock_try(&overflow->lock)) {
        return 0;
    }
    size_t held = atomic_load_explicit(&overflow->count, memory_order_relaxed);
    size_t taken = held < most ? held : most;
    memcpy(blocks, (void **)(void *)overflow->region.base + (held - taken), taken * sizeof *blocks);
    atomic_store_explicit(&overflow->count, held - taken, memory_order_relaxed);
    if (taken == held) {
        give_back(overflow);
    }
    lock_release(&overflow->lock);
    return taken;
}
