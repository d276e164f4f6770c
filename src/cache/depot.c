#include "cache/depot.h"

#include "base/assert.h"
#include "base/size.h"
#include "os/vm.h"

#include <string.h>

/* A bin leaves this part of what all may hold to others. */
#define OTHERS_DIVISOR 4
/* By which a bound grows. */
#define GROWTH_STEP        ((size_t)256 << 10)
#define DEPOT_FLUSH_BLOCKS 64
#define MAX_BIN_CREDIT     ((size_t)128 << 10)

static size_t depot_get(const _Atomic(size_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void depot_set(_Atomic(size_t) *word, size_t value) {
    atomic_store_explicit(word, value, memory_order_relaxed);
}

/* One more than the last class that has a bin. */
static uint32_t class_end(const struct depot *depot) {
    return depot->bins == NULL ? 0 : depot->classes->count;
}

/* Not kept in the bin: a bin that was never used is not written at the start either. */
static void **blocks_of(const struct depot *depot, uint32_t class) {
    return depot->blocks + (size_t) class * depot->bin_blocks;
}

static void depot_enter(const struct depot *depot, struct depot_bin *bin) {
    if (!depot->exclusive) {
        lock_acquire(&bin->lock);
    }
}

static void depot_leave(const struct depot *depot, struct depot_bin *bin) {
    if (!depot->exclusive) {
        lock_release(&bin->lock);
    }
}

size_t depot_charge(const struct depot *depot, uint32_t class, size_t count) {
    size_t size = depot->classes->of[class].size;
    return count * size_max(size, MIN_DEPOT_CHARGE);
}

size_t depot_blocks(const struct depot *depot, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        size_t count = depot_get(&depot->bins[class].count);
        blocks += count;
        *bytes += count * depot->classes->of[class].size;
    }
    return blocks;
}

size_t depot_max_blocks(const struct depot *depot, size_t *bytes) {
    *bytes = depot->small.max_bound + depot->medium.max_bound;
    return depot->small.max_bound / MIN_DEPOT_CHARGE + depot->medium.max_bound / MIN_MEDIUM_SIZE;
}

static struct depot_budget *budget_of(struct depot *depot, uint32_t class) {
    return depot->classes->of[class].size < MIN_MEDIUM_SIZE ? &depot->small : &depot->medium;
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
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        lock_set_rank(&depot->bins[class].lock, LOCK_DEPOT_BIN);
    }
    depot->small = (struct depot_budget){.min_bound = small, .max_bound = small, .bound = small};
    depot->medium = (struct depot_budget){.min_bound = medium, .max_bound = max_medium, .bound = medium};
    return true;
}

/* Returns the sum. */
static size_t add_charge(const struct depot *depot, struct depot_budget *budget, size_t more) {
    if (!depot->exclusive) {
        return atomic_fetch_add_explicit(&budget->charge, more, memory_order_relaxed) + more;
    }
    depot_set(&budget->charge, depot_get(&budget->charge) + more);
    return depot_get(&budget->charge);
}

/* Blocks that left: the bin keeps up to max_credit of their charge. Under the bin's lock. */
static void give_credit(struct depot *depot, uint32_t class, size_t count, size_t max_credit) {
    struct depot_bin *bin = &depot->bins[class];
    size_t credit = depot_get(&bin->credit) + depot_charge(depot, class, count);
    calm_assert(depot->exclusive || lock_is_mine(&bin->lock), class);
    if (credit > max_credit) {
        add_charge(depot, budget_of(depot, class), max_credit - credit);
        credit = max_credit;
    }
    depot_set(&bin->credit, credit);
}

/* Blocks that come; false if they exceed the bound. Under the bin's lock. */
static bool take_credit(struct depot *depot, uint32_t class, size_t count) {
    struct depot_budget *budget = budget_of(depot, class);
    struct depot_bin *bin = &depot->bins[class];
    size_t charge = depot_charge(depot, class, count);
    calm_assert(depot->exclusive || lock_is_mine(&bin->lock), class);
    size_t credit = depot_get(&bin->credit);
    if (credit < charge) {
        /* Added before it is compared: of concurrent threads some may be refused needlessly, but they never
         * exceed the bound together. */
        size_t more = charge - credit;
        if (add_charge(depot, budget, more) > depot_get(&budget->bound)) {
            add_charge(depot, budget, 0 - more);
            return false;
        }
        credit += more;
    }
    depot_set(&bin->credit, credit - charge);
    return true;
}

size_t depot_take(struct depot *depot, uint32_t class, void **blocks, size_t count) {
    if (depot->bins == NULL) {
        return 0;
    }
    struct depot_bin *bin = &depot->bins[class];
    if (depot_get(&bin->count) == 0) {
        turns_note_alternation(&bin->turns, false);
        return 0; /* as good as after the lock: a magazine that arrives now may be missed either way */
    }
    depot_enter(depot, bin);
    size_t held = depot_get(&bin->count);
    size_t taken = size_min(held, count);
    calm_assert(held <= depot->bin_blocks && bin->min_count <= held, class, held, bin->min_count);
    held -= taken;
    memcpy(blocks, blocks_of(depot, class) + held, taken * sizeof *blocks);
    depot_set(&bin->count, held);
    bin->min_count = size_min(bin->min_count, held);
    give_credit(depot, class, taken, MAX_BIN_CREDIT);
    depot_leave(depot, bin);
    return taken;
}

bool depot_put(struct depot *depot, uint32_t class, void *const *blocks, size_t count) {
    if (depot->bins == NULL) {
        return false;
    }
    struct depot_bin *bin = &depot->bins[class];
    depot_enter(depot, bin);
    size_t held = depot_get(&bin->count);
    size_t bound = depot_get(&budget_of(depot, class)->bound);
    calm_assert(held <= depot->bin_blocks && bin->min_count <= held, class, held, bin->min_count);
    size_t max_charge = bound - bound / OTHERS_DIVISOR;
    bool fits = held + count <= depot->bin_blocks && depot_charge(depot, class, held + count) <= max_charge &&
                take_credit(depot, class, count);
    if (fits) {
        memcpy(blocks_of(depot, class) + held, blocks, count * sizeof *blocks);
        depot_set(&bin->count, held + count);
    } else {
        turns_note_alternation(&bin->turns, true);
    }
    depot_leave(depot, bin);
    return fits;
}

void depot_grow(struct depot *depot, uint32_t class) {
    if (depot->bins == NULL || !turns_are_due(&depot->bins[class].turns)) {
        return;
    }
    struct depot_budget *budget = budget_of(depot, class);
    size_t bound = depot_get(&budget->bound);
    calm_assert(bound >= budget->min_bound && bound <= budget->max_bound, class, bound);
    if (bound < budget->max_bound) {
        /* Of two concurrent steps one may be lost, or one beside a fall: the bound keeps its limits. */
        turns_restart(&depot->bins[class].turns);
        depot_set(&budget->bound, size_min(bound + GROWTH_STEP, budget->max_bound));
    }
}

/* Lowers a bound by the charge of blocks that were not needed. */
static void depot_shrink(struct depot_budget *budget, size_t charge) {
    calm_assert(depot_get(&budget->bound) >= budget->min_bound, depot_get(&budget->bound), budget->min_bound);
    size_t grown = depot_get(&budget->bound) - budget->min_bound;
    depot_set(&budget->bound, budget->min_bound + size_minus(grown, charge));
}

static void flush_bin(struct depot *depot, uint32_t class, bool all, put_flushed *put, void *context) {
    struct depot_bin *bin = &depot->bins[class];
    size_t left = SIZE_MAX;
    do {
        void *blocks[DEPOT_FLUSH_BLOCKS];
        depot_enter(depot, bin);
        size_t held = depot_get(&bin->count);
        if (left == SIZE_MAX) {
            left = all ? held : bin->min_count;
        }
        /* From the bottom: the oldest. */
        size_t count = size_min(left, DEPOT_FLUSH_BLOCKS);
        count = size_min(count, held);
        calm_assert(held <= depot->bin_blocks && bin->min_count <= held, class, held, bin->min_count);
        void **held_blocks = blocks_of(depot, class);
        memcpy(blocks, held_blocks, count * sizeof *blocks);
        memmove(held_blocks, held_blocks + count, (held - count) * sizeof *blocks);
        depot_set(&bin->count, held - count);
        bin->min_count = held - count;
        give_credit(depot, class, count, 0);
        depot_leave(depot, bin);
        if (count == 0) {
            break;
        }
        depot_shrink(budget_of(depot, class), depot_charge(depot, class, count));
        put(context, blocks, count);
        left -= count;
    } while (left > 0);
}

void depot_flush(struct depot *depot, bool all, put_flushed *put, void *context) {
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        struct depot_bin *bin = &depot->bins[class];
        turns_restart(&bin->turns);
        /* A bin that was never used holds no memory, and is not written. */
        if (depot_get(&bin->count) > 0 || depot_get(&bin->credit) > 0) {
            flush_bin(depot, class, all, put, context);
        }
    }
}

bool depot_is_held(const struct depot *depot) {
    bool held = false;
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        held |= lock_is_mine(&depot->bins[class].lock);
    }
    return held;
}

void depot_before_fork(struct depot *depot, bool waits) {
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        lock_acquire_for_fork(&depot->bins[class].lock, waits);
    }
}

void depot_after_fork(struct depot *depot, bool child) {
    for (uint32_t class = 1; class < class_end(depot); ++class) {
        struct depot_bin *bin = &depot->bins[class];
        lock_release_after_fork(&bin->lock);
        if (child && lock_reset_in_child(&bin->lock)) {
            /* The charge stays: from now on the depot may hold less, by at most a bin's contents. */
            depot_set(&bin->count, 0);
            bin->min_count = 0;
        }
    }
}
