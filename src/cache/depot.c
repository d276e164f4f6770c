#include "cache/depot.h"

#include "os/address_space.h"

#include <string.h>

/* Medium blocks may fill a shelf with this much, or this part of the bound; small ones with as many as it has
 * room for. */
#define SHELF_BYTES_MOST ((size_t)256 << 10)
#define SHELF_DIVISOR    8
/* So often a shelf is full and then empty before the bound grows, and by so much. */
#define TURNS        4
#define GROWTH       ((size_t)256 << 10)
#define SHED_AT_ONCE 64
#define CREDIT_MOST  ((size_t)128 << 10)

/* Not kept in the shelf: what was never used is not written at the start either. */
static void **blocks_of(const struct depot *depot, uint32_t class) {
    return depot->blocks + (size_t) class * DEPOT_SHELF_BLOCKS;
}

static void enter(const struct depot *depot, struct depot_shelf *shelf) {
    if (!depot->owned) {
        lock_acquire(&shelf->lock);
    }
}

static void leave(const struct depot *depot, struct depot_shelf *shelf) {
    if (!depot->owned) {
        lock_release(&shelf->lock);
    }
}

/* Returns the sum. */
static size_t add_charge(const struct depot *depot, struct depot_budget *budget, size_t more) {
    if (!depot->owned) {
        return atomic_fetch_add_explicit(&budget->charge, more, memory_order_relaxed) + more;
    }
    size_t sum = atomic_load_explicit(&budget->charge, memory_order_relaxed) + more;
    atomic_store_explicit(&budget->charge, sum, memory_order_relaxed);
    return sum;
}

size_t depot_charge(const struct depot *depot, uint32_t class, size_t count) {
    size_t size = depot->classes->of[class].size;
    return count * (size < DEPOT_CHARGE_LEAST ? DEPOT_CHARGE_LEAST : size);
}

size_t depot_blocks(const struct depot *depot, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (uint32_t class = 1; depot->shelves != NULL && class < depot->classes->count; ++class) {
        size_t held = atomic_load_explicit(&depot->shelves[class].count, memory_order_relaxed);
        blocks += held;
        *bytes += held * depot->classes->of[class].size;
    }
    return blocks;
}

size_t depot_blocks_most(const struct depot *depot, size_t *bytes) {
    *bytes = depot->small.most + depot->medium.most;
    return depot->small.most / DEPOT_CHARGE_LEAST + depot->medium.most / SIZE_MEDIUM_LEAST;
}

static struct depot_budget *budget_of(struct depot *depot, uint32_t class) {
    return depot->classes->of[class].size < SIZE_MEDIUM_LEAST ? &depot->small : &depot->medium;
}

static size_t bound_of(const struct depot_budget *budget) {
    return atomic_load_explicit(&budget->bound, memory_order_relaxed);
}

static void set_bound(struct depot_budget *budget, size_t bytes) {
    atomic_store_explicit(&budget->bound, bytes, memory_order_relaxed);
}

static void start_budget(struct depot_budget *budget, size_t least, size_t most) {
    budget->least = least;
    budget->most = most;
    set_bound(budget, least);
}

bool depot_init(struct depot *depot, const struct size_classes *classes, size_t small, size_t medium,
                size_t medium_most) {
    size_t page = os_page_size();
    size_t shelves_bytes = (classes->count * sizeof *depot->shelves + page - 1) & ~(page - 1);
    size_t blocks_bytes = sizeof(void *) * DEPOT_SHELF_BLOCKS * classes->count;
    size_t bytes = (shelves_bytes + blocks_bytes + page - 1) & ~(page - 1);
    char *memory = os_reserve(bytes, page);
    if (memory == NULL || !os_commit(memory, bytes)) {
        return false;
    }
    depot->shelves = (struct depot_shelf *)(void *)memory;
    depot->blocks = (void **)(void *)(memory + shelves_bytes);
    depot->classes = classes;
    start_budget(&depot->small, small, small);
    start_budget(&depot->medium, medium, medium_most);
    return true;
}

static uint32_t shelf_most(const struct depot_budget *budget, const struct size_class *class) {
    size_t bytes = bound_of(budget) / SHELF_DIVISOR;
    size_t blocks = (bytes > SHELF_BYTES_MOST ? bytes : SHELF_BYTES_MOST) / class->size;
    return blocks > DEPOT_SHELF_BLOCKS ? DEPOT_SHELF_BLOCKS : (uint32_t)blocks;
}

/* What is not charged any more. Under the shelf's lock. */
static void give_credit(const struct depot *depot, struct depot_budget *budget, struct depot_shelf *shelf,
                        size_t charge, size_t keep) {
    size_t credit = atomic_load_explicit(&shelf->credit, memory_order_relaxed) + charge;
    if (credit > keep) {
        add_charge(depot, budget, keep - credit);
        credit = keep;
    }
    atomic_store_explicit(&shelf->credit, credit, memory_order_relaxed);
}

/* False if it would be too much. Under the shelf's lock. */
static bool take_credit(const struct depot *depot, struct depot_budget *budget, struct depot_shelf *shelf,
                        size_t charge) {
    size_t credit = atomic_load_explicit(&shelf->credit, memory_order_relaxed);
    if (credit < charge) {
        /* Added before it is looked at: threads that come at once may be refused needlessly, never let in
         * together. */
        size_t more = charge - credit;
        if (add_charge(depot, budget, more) > bound_of(budget)) {
            add_charge(depot, budget, 0 - more);
            return false;
        }
        credit += more;
    }
    atomic_store_explicit(&shelf->credit, credit - charge, memory_order_relaxed);
    return true;
}

size_t depot_take(struct depot *depot, uint32_t class, void **blocks, size_t count) {
    if (depot->shelves == NULL) {
        return 0;
    }
    struct depot_shelf *shelf = &depot->shelves[class];
    if (atomic_load_explicit(&shelf->count, memory_order_relaxed) == 0) {
        if (atomic_load_explicit(&shelf->was_full, memory_order_relaxed)) {
            atomic_store_explicit(&shelf->was_full, false, memory_order_relaxed);
            uint32_t turns = atomic_load_explicit(&shelf->turns, memory_order_relaxed);
            atomic_store_explicit(&shelf->turns, turns + 1, memory_order_relaxed);
        }
        return 0; /* as good as after the lock: a magazine that arrives now may be missed either way */
    }
    enter(depot, shelf);
    uint32_t held = atomic_load_explicit(&shelf->count, memory_order_relaxed);
    size_t taken = held < count ? held : count;
    held -= (uint32_t)taken;
    memcpy(blocks, blocks_of(depot, class) + held, taken * sizeof *blocks);
    atomic_store_explicit(&shelf->count, held, memory_order_relaxed);
    if (held < shelf->lowest) {
        shelf->lowest = held;
    }
    give_credit(depot, budget_of(depot, class), shelf, depot_charge(depot, class, taken), CREDIT_MOST);
    leave(depot, shelf);
    return taken;
}

bool depot_put(struct depot *depot, uint32_t class, void *const *blocks, size_t count) {
    if (depot->shelves == NULL) {
        return false;
    }
    const struct size_class *of = &depot->classes->of[class];
    struct depot_budget *budget = budget_of(depot, class);
    struct depot_shelf *shelf = &depot->shelves[class];
    enter(depot, shelf);
    uint32_t held = atomic_load_explicit(&shelf->count, memory_order_relaxed);
    bool fits = held + count <= shelf_most(budget, of) &&
                take_credit(depot, budget, shelf, depot_charge(depot, class, count));
    if (fits) {
        memcpy(blocks_of(depot, class) + held, blocks, count * sizeof *blocks);
        atomic_store_explicit(&shelf->count, held + (uint32_t)count, memory_order_relaxed);
    } else {
        atomic_store_explicit(&shelf->was_full, true, memory_order_relaxed);
    }
    leave(depot, shelf);
    return fits;
}

void depot_grow(struct depot *depot, uint32_t class, size_t wanted) {
    if (depot->shelves == NULL) {
        return;
    }
    struct depot_budget *budget = budget_of(depot, class);
    struct depot_shelf *shelf = &depot->shelves[class];
    size_t bound = bound_of(budget);
    size_t most = wanted < budget->most ? wanted : budget->most;
    if (bound < most && atomic_load_explicit(&shelf->turns, memory_order_relaxed) >= TURNS) {
        /* One of two steps at once may be lost, or one beside a fall: between least and most it stays. */
        atomic_store_explicit(&shelf->turns, 0, memory_order_relaxed);
        set_bound(budget, most - bound < GROWTH ? most : bound + GROWTH);
    }
}

/* By what nobody wanted; against growth at the same time as said there. */
static void shrink(struct depot_budget *budget, size_t charge) {
    size_t grown = bound_of(budget) - budget->least;
    set_bound(budget, budget->least + (charge < grown ? grown - charge : 0));
}

size_t depot_shed(struct depot *depot, bool all,
                  void (*put)(void *context, void *const *blocks, size_t count), void *context) {
    size_t shed = 0;
    for (uint32_t class = 1; depot->shelves != NULL && class < depot->classes->count; ++class) {
        struct depot_shelf *shelf = &depot->shelves[class];
        if (atomic_load_explicit(&shelf->turns, memory_order_relaxed) != 0) {
            atomic_store_explicit(&shelf->turns, 0, memory_order_relaxed);
        }
        /* One that was never used holds no memory, and stays so. */
        if (atomic_load_explicit(&shelf->count, memory_order_relaxed) == 0 &&
            atomic_load_explicit(&shelf->credit, memory_order_relaxed) == 0) {
            continue;
        }
        void *blocks[SHED_AT_ONCE];
        size_t count;
        bool first = true;
        size_t wanted = 0;
        do {
            enter(depot, shelf);
            uint32_t held = atomic_load_explicit(&shelf->count, memory_order_relaxed);
            if (first) {
                wanted = all ? held : shelf->lowest;
                first = false;
            }
            /* From the bottom: those have lain longest. */
            count = wanted < SHED_AT_ONCE ? wanted : SHED_AT_ONCE;
            count = count < held ? count : held;
            void **held_blocks = blocks_of(depot, class);
            memcpy(blocks, held_blocks, count * sizeof *blocks);
            memmove(held_blocks, held_blocks + count, (held - count) * sizeof *blocks);
            atomic_store_explicit(&shelf->count, held - (uint32_t)count, memory_order_relaxed);
            shelf->lowest = held - (uint32_t)count;
            size_t charge = depot_charge(depot, class, count);
            give_credit(depot, budget_of(depot, class), shelf, charge, 0);
            leave(depot, shelf);
            shrink(budget_of(depot, class), charge);
            wanted -= count;
            if (count > 0) {
                put(context, blocks, count);
            }
            shed += count;
        } while (count > 0 && wanted > 0);
    }
    return shed;
}

bool depot_is_held(const struct depot *depot) {
    bool held = false;
    for (uint32_t class = 1; depot->shelves != NULL && class < depot->classes->count; ++class) {
        held |= lock_is_mine(&depot->shelves[class].lock);
    }
    return held;
}

void depot_before_fork(struct depot *depot, bool waits) {
    for (uint32_t class = 1; depot->shelves != NULL && class < depot->classes->count; ++class) {
        lock_acquire_for_fork(&depot->shelves[class].lock, waits);
    }
}

void depot_after_fork(struct depot *depot, bool child) {
    for (uint32_t class = 1; depot->shelves != NULL && class < depot->classes->count; ++class) {
        struct depot_shelf *shelf = &depot->shelves[class];
        lock_release_after_fork(&shelf->lock);
        if (child && lock_reset_in_child(&shelf->lock)) {
            /* The charge stays: at most a shelf's less than the bound may be held from now on. */
            atomic_store_explicit(&shelf->count, 0, memory_order_relaxed);
            shelf->lowest = 0;
        }
    }
}
