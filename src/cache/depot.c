#include "cache/depot.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/vm.h"

#include <string.h>

/* A bin leaves this part of the bound to other bins. */
#define OTHERS_DIVISOR 4
/* The step by which a bound grows. */
#define GROWTH_STEP        ((size_t)256 << 10)
#define DEPOT_FLUSH_BLOCKS 64
#define MAX_BIN_CREDIT     ((size_t)128 << 10)

static size_t depot_get(const _Atomic(size_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void depot_set(_Atomic(size_t) *word, size_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* Returns one more than the last class that has a bin, or 0 if no class has
 * one. */
static uint32_t class_end(const struct depot *depot) {
    return depot->bins == NULL ? 0 : depot->classes->count;
}

/* The address is computed, since a bin that stored it would be written at the
 * start, although it may never be used. */
static void **blocks_of(const struct depot *depot, uint32_t size_class) {
    return depot->blocks + (size_t)size_class * depot->bin_blocks;
}

size_t depot_charge(const struct depot *depot, uint32_t size_class, size_t count) {
    size_t size = depot->classes->of[size_class].size;
    return count * size_max(size, MIN_DEPOT_CHARGE);
}

size_t depot_blocks(const struct depot *depot, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        size_t count = depot_get(&depot->bins[size_class].count);
        blocks += count;
        *bytes += count * depot->classes->of[size_class].size;
    }
    return blocks;
}

size_t depot_max_blocks(const struct depot *depot, size_t *bytes) {
    *bytes = depot->small.max_bound + depot->medium.max_bound;
    return depot->small.max_bound / MIN_DEPOT_CHARGE + depot->medium.max_bound / MIN_MEDIUM_SIZE;
}

static struct depot_budget *budget_of(struct depot *depot, uint32_t size_class) {
    return depot->classes->of[size_class].size < MIN_MEDIUM_SIZE ? &depot->small : &depot->medium;
}

bool depot_init(struct depot *depot, const struct size_classes *classes, size_t bin_blocks, size_t small,
                size_t medium, size_t max_medium) {
    calm_assert(small <= medium + small && medium <= max_medium && bin_blocks > 0, small, medium, max_medium);
    size_t bins_bytes = vm_round_up(classes->count * sizeof *depot->bins);
    char *memory = vm_map(bins_bytes + sizeof(void *) * bin_blocks * classes->count);
    if (memory == NULL) {
        return false;
    }
    depot->bins = (struct depot_bin *)(void *)memory;
    depot->blocks = (void **)(void *)(memory + bins_bytes);
    depot->classes = classes;
    depot->bin_blocks = bin_blocks;
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        lock_set_rank(&depot->bins[size_class].lock, LOCK_DEPOT_BIN);
    }
    depot->small = (struct depot_budget){.min_bound = small, .max_bound = small, .bound = small};
    depot->medium = (struct depot_budget){.min_bound = medium, .max_bound = max_medium, .bound = medium};
    return true;
}

/* Adds to the charge, and returns the new charge. */
static size_t add_charge(struct depot_budget *budget, size_t more) {
    return atomic_fetch_add_explicit(&budget->charge, more, memory_order_relaxed) + more;
}

/* Called for blocks that left the bin. The bin keeps up to max_credit of their
 * charge. The caller holds the bin's lock. */
static void give_credit(struct depot *depot, uint32_t size_class, size_t count, size_t max_credit) {
    struct depot_bin *bin = &depot->bins[size_class];
    size_t credit = depot_get(&bin->credit) + depot_charge(depot, size_class, count);
    calm_assert(lock_is_mine(&bin->lock), size_class);
    if (credit > max_credit) {
        add_charge(budget_of(depot, size_class), max_credit - credit);
        credit = max_credit;
    }
    depot_set(&bin->credit, credit);
}

/* Called for blocks that come to the bin. Returns false if they exceed the
 * bound. The caller holds the bin's lock. */
static bool take_credit(struct depot *depot, uint32_t size_class, size_t count) {
    struct depot_budget *budget = budget_of(depot, size_class);
    struct depot_bin *bin = &depot->bins[size_class];
    size_t charge = depot_charge(depot, size_class, count);
    calm_assert(lock_is_mine(&bin->lock), size_class);
    size_t credit = depot_get(&bin->credit);
    if (credit < charge) {
        /* The charge is added before it is compared. Concurrent threads
         * therefore never exceed the bound together, but some may be refused
         * needlessly. */
        size_t more = charge - credit;
        if (add_charge(budget, more) > depot_get(&budget->bound)) {
            add_charge(budget, 0 - more);
            return false;
        }
        credit += more;
    }
    depot_set(&bin->credit, credit - charge);
    return true;
}

size_t depot_take(struct depot *depot, uint32_t size_class, void **blocks, size_t count) {
    if (depot->bins == NULL) {
        return 0;
    }
    struct depot_bin *bin = &depot->bins[size_class];
    if (depot_get(&bin->count) == 0) {
        turns_note_alternation(&bin->turns, false);
        return 0; /* a magazine that arrives now might be missed under the lock, too */
    }
    lock_acquire(&bin->lock);
    size_t held = depot_get(&bin->count);
    size_t taken = size_min(held, count);
    calm_assert(held <= depot->bin_blocks && bin->min_count <= held, size_class, held, bin->min_count);
    held -= taken;
    memcpy(blocks, blocks_of(depot, size_class) + held, taken * sizeof *blocks);
    depot_set(&bin->count, held);
    bin->min_count = size_min(bin->min_count, held);
    give_credit(depot, size_class, taken, MAX_BIN_CREDIT);
    lock_release(&bin->lock);
    return taken;
}

bool depot_put(struct depot *depot, uint32_t size_class, void *const *blocks, size_t count) {
    if (depot->bins == NULL) {
        return false;
    }
    struct depot_bin *bin = &depot->bins[size_class];
    lock_acquire(&bin->lock);
    size_t held = depot_get(&bin->count);
    size_t bound = depot_get(&budget_of(depot, size_class)->bound);
    calm_assert(held <= depot->bin_blocks && bin->min_count <= held, size_class, held, bin->min_count);
    size_t max_charge = bound - bound / OTHERS_DIVISOR;
    bool fits = held + count <= depot->bin_blocks &&
                depot_charge(depot, size_class, held + count) <= max_charge &&
                take_credit(depot, size_class, count);
    if (fits) {
        memcpy(blocks_of(depot, size_class) + held, blocks, count * sizeof *blocks);
        depot_set(&bin->count, held + count);
    } else {
        turns_note_alternation(&bin->turns, true);
    }
    lock_release(&bin->lock);
    return fits;
}

void depot_grow(struct depot *depot, uint32_t size_class) {
    if (depot->bins == NULL || !turns_are_due(&depot->bins[size_class].turns)) {
        return;
    }
    struct depot_budget *budget = budget_of(depot, size_class);
    size_t bound = depot_get(&budget->bound);
    calm_assert(bound >= budget->min_bound && bound <= budget->max_bound, size_class, bound);
    if (bound < budget->max_bound) {
        /* A step may be lost if another thread raises or lowers the bound at
         * the same time. The bound stays within its limits nevertheless. */
        turns_restart(&depot->bins[size_class].turns);
        depot_set(&budget->bound, size_min(bound + GROWTH_STEP, budget->max_bound));
    }
}

/* Lowers a bound by the charge of blocks that were not needed. */
static void depot_shrink(struct depot_budget *budget, size_t charge) {
    calm_assert(depot_get(&budget->bound) >= budget->min_bound, depot_get(&budget->bound), budget->min_bound);
    size_t grown = depot_get(&budget->bound) - budget->min_bound;
    depot_set(&budget->bound, budget->min_bound + size_minus(grown, charge));
}

static void flush_bin(struct depot *depot, uint32_t size_class, bool all, put_flushed *put, void *context) {
    struct depot_bin *bin = &depot->bins[size_class];
    size_t left = SIZE_MAX;
    do {
        void *blocks[DEPOT_FLUSH_BLOCKS];
        lock_acquire(&bin->lock);
        size_t held = depot_get(&bin->count);
        if (left == SIZE_MAX) {
            left = all ? held : bin->min_count;
        }
        /* The oldest blocks are at the bottom. */
        size_t count = size_min(left, DEPOT_FLUSH_BLOCKS);
        count = size_min(count, held);
        calm_assert(held <= depot->bin_blocks && bin->min_count <= held, size_class, held, bin->min_count);
        void **held_blocks = blocks_of(depot, size_class);
        memcpy(blocks, held_blocks, count * sizeof *blocks);
        memmove(held_blocks, held_blocks + count, (held - count) * sizeof *blocks);
        depot_set(&bin->count, held - count);
        bin->min_count = held - count;
        give_credit(depot, size_class, count, 0);
        lock_release(&bin->lock);
        if (count == 0) {
            break;
        }
        depot_shrink(budget_of(depot, size_class), depot_charge(depot, size_class, count));
        put(context, blocks, count);
        left -= count;
    } while (left > 0);
}

void depot_flush(struct depot *depot, bool all, put_flushed *put, void *context) {
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        struct depot_bin *bin = &depot->bins[size_class];
        turns_restart(&bin->turns);
        /* A bin that was never used must not be written, since it holds no
         * memory. */
        if (depot_get(&bin->count) > 0 || depot_get(&bin->credit) > 0) {
            flush_bin(depot, size_class, all, put, context);
        }
    }
}

bool depot_is_held(const struct depot *depot) {
    bool held = false;
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        held |= lock_is_mine(&depot->bins[size_class].lock);
    }
    return held;
}

void depot_before_fork(struct depot *depot, bool waits) {
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        lock_acquire_for_fork(&depot->bins[size_class].lock, waits);
    }
}

void depot_after_fork(struct depot *depot, bool child) {
    for (uint32_t size_class = 1; size_class < class_end(depot); ++size_class) {
        struct depot_bin *bin = &depot->bins[size_class];
        lock_release_after_fork(&bin->lock);
        if (child && lock_reset_in_child(&bin->lock)) {
            /* The charge of the lost blocks stays. The depot may therefore hold
             * less from now on, by at most the contents of a bin. */
            depot_set(&bin->count, 0);
            bin->min_count = 0;
        }
    }
}
