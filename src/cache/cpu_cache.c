#include "cache/cpu_cache.h"

#include "cache/rseq.h"
#include "os/address_space.h"
#include "os/thread.h"

#include <string.h>

/* Threads' stacks may be small. */
#define DRAINED_AT_ONCE 256
/* Where address space is limited, regions take no more of it than one part in so many. */
#define LIMIT_SHARE 8

static const char nothing;

struct cpu_caches calm_caches = {.alone = &nothing, .alone_without_helper = &nothing};
struct vfork_number calm_vfork;

/* glibc 2.32 and later. */
extern char __libc_single_threaded __attribute__((weak));

static char *region_of(const struct cpu_caches *caches, unsigned number) {
    return caches->regions + ((size_t)number << REGION_SHIFT);
}

/* A word of a stack: written under the region's lock, or by a sequence of the CPU's own thread. */
static uint64_t get_top(char *region, uint32_t class) {
    return atomic_load_explicit(stack_top_of(region, class), memory_order_relaxed);
}

static void set_top(char *region, uint32_t class, uint64_t top) {
    atomic_store_explicit(stack_top_of(region, class), top, memory_order_release);
}

static uint32_t get(const _Atomic(uint32_t) *word) {
    return atomic_load_explicit(word, memory_order_relaxed);
}

static void set(_Atomic(uint32_t) *word, uint32_t value) {
    atomic_store_explicit(word, value, memory_order_release);
}

static uint32_t get_bottom(char *region, uint32_t class) {
    return ~get(&stack_bounds_of(region, class)->not_bottom);
}

static void set_bottom(char *region, uint32_t class, uint32_t bottom) {
    set(&stack_bounds_of(region, class)->not_bottom, ~bottom);
}

bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes, struct rseq_place place) {
    size_t page = os_page_size();
    if (&__libc_single_threaded != NULL) {
        thread_alone = &__libc_single_threaded;
    }
    caches->classes = classes;
    caches->rseq_area = place.area;
    caches->cpu_number = place.cpu_number;
    caches->node = place.node;
    caches->count = cpus_possible();
    size_t most = os_address_space_limit() / LIMIT_SHARE / REGION_BYTES;
    caches->one_each = caches->count <= most;
    if (!caches->one_each) {
        caches->count = most == 0 ? 1 : (unsigned)most;
    }

    uint32_t next = 2 * SIZE_CLASSES;
    for (uint32_t class = 1; class < classes->count; ++class) {
        ++next; /* never written: what a push to an empty stack compares its block with */
        caches->start_of[class] = (uint16_t)next;
        next += classes->of[class].grown_most;
    }
    if (next > REGION_BYTES / 8) {
        return false;
    }
    size_t all = (size_t)caches->count * 2;
    size_t states_bytes = (caches->count * sizeof *caches->states + page - 1) & ~(page - 1);
    size_t regions_bytes = (all * REGION_BYTES + page - 1) & ~(page - 1);
    char *states = os_reserve(states_bytes, page);
    caches->regions = os_reserve(regions_bytes, page);
    if (states == NULL || caches->regions == NULL || !os_commit(states, states_bytes)) {
        return false;
    }
    /* Closed regions are read only, by the fast path. */
    os_make_readable(caches->regions, regions_bytes);
    caches->states = (struct region_state *)(void *)states;
    return true;
}

void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode, bool may_be_alone) {
    atomic_store_explicit(&caches->mode, mode, memory_order_release);
    if (mode == CACHE_LOCKED && may_be_alone) {
        caches->alone_without_helper = thread_alone;
        cpu_caches_without_helper(caches);
    }
    caches->in_rseq_mode = mode == CACHE_RSEQ;
    calm_vfork = (struct vfork_number){mode == CACHE_RSEQ ? caches->cpu_number : 0, caches->count};
}

static void set_alone(struct cpu_caches *caches, const char *alone) {
    if (atomic_load_explicit(&caches->alone, memory_order_relaxed) != alone) {
        atomic_store_explicit(&caches->alone, alone, memory_order_release);
    }
}

void cpu_caches_with_helper(struct cpu_caches *caches) {
    set_alone(caches, &nothing);
}

void cpu_caches_without_helper(struct cpu_caches *caches) {
    set_alone(caches, caches->alone_without_helper);
}

static unsigned open_regions(const struct cpu_caches *caches) {
    unsigned open = 0;
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        open += atomic_load_explicit(&caches->states[number].open, memory_order_relaxed);
    }
    return open;
}

size_t cpu_caches_most_blocks(const struct cpu_caches *caches) {
    size_t blocks = 0;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        blocks += caches->classes->of[class].grown_most;
    }
    return blocks * open_regions(caches);
}

size_t cpu_caches_most_bytes(const struct cpu_caches *caches) {
    size_t bytes = GROWN_BYTES_MOST;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        bytes += (size_t)caches->classes->of[class].cache_most * caches->classes->of[class].size;
    }
    return bytes * open_regions(caches);
}

/* Threads share a region where they hash to the same: a lock is held for a few instructions. A lone thread
 * has the first. */
static unsigned locked_region(void) {
    if (cpu_cache_is_alone()) {
        return 0;
    }
    uint64_t mixed = (uint64_t)(uintptr_t)thread_pointer() * 0x9e3779b97f4a7c15ULL;
    return (unsigned)((mixed >> 32) * calm_caches.count >> 32);
}

static unsigned current_region(void) {
    if (cpu_cache_is_rseq()) {
        const char *number = (const char *)thread_pointer() + calm_caches.cpu_number;
        return *(const volatile uint32_t *)(const void *)number;
    }
    return locked_region();
}

bool cpu_cache_is_vforked(void) {
    return cpu_cache_is_rseq() && current_region() >= calm_caches.count;
}

unsigned cpu_cache_number(void) {
    return current_region();
}

unsigned cpu_cache_node(void) {
    if (calm_caches.node == 0 || !cpu_cache_is_rseq()) {
        return 0;
    }
    const char *number = (const char *)thread_pointer() + calm_caches.node;
    return *(const volatile uint32_t *)(const void *)number;
}

static void close_stacks(const struct cpu_caches *caches, char *region) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        set_bottom(region, class, UINT32_MAX);
        set(&stack_bounds_of(region, class)->end, 0);
    }
}

/*
 * The stacks are empty, and nobody else can change them: what is closed looks full and empty. Open, they have
 * no room at first. Under the region's lock.
 */
static void open_stacks(const struct cpu_caches *caches, struct region_state *state, char *region) {
    state->grown_bytes = 0;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        struct stack_bounds *bounds = stack_bounds_of(region, class);
        uint32_t start = caches->start_of[class];
        /* In this order a sequence in between finds either nothing to pop or no room to push. */
        set_bottom(region, class, UINT32_MAX);
        set_top(region, class, start);
        set_bottom(region, class, start);
        set(&bounds->end, start);
    }
}

bool cpu_cache_open(struct cpu_caches *caches, uint32_t class) {
    if (atomic_load_explicit(&caches->mode, memory_order_relaxed) == CACHE_OFF) {
        return false;
    }
    unsigned number = current_region();
    if (number >= caches->count) {
        return false;
    }
    struct region_state *state = &caches->states[number];
    char *region = region_of(caches, number);
    struct stack_bounds *bounds = stack_bounds_of(region, class);
    uint32_t start = caches->start_of[class];
    if (atomic_load_explicit(&state->open, memory_order_relaxed) && get(&bounds->end) != start) {
        return false;
    }
    lock_acquire(&state->lock);
    bool is_open = atomic_load_explicit(&state->open, memory_order_relaxed);
    if (!is_open && os_commit(region, REGION_BYTES)) {
        open_stacks(caches, state, region);
        atomic_store_explicit(&state->open, true, memory_order_relaxed);
        is_open = true;
    }
    bool opened = is_open && get(&bounds->end) == start;
    if (opened) {
        set(&bounds->end, start + caches->classes->of[class].cache_most);
    }
    lock_release(&state->lock);
    return opened;
}

/* The same operations on a region that is the caller's: it holds the lock, or is alone. */
static size_t pop_owned(char *region, uint32_t class, void **blocks, size_t count) {
    uint64_t top = get_top(region, class);
    uint64_t bottom = get_bottom(region, class);
    if (top <= bottom) {
        return 0;
    }
    size_t taken = top - bottom < count ? top - bottom : count;
    memcpy(blocks, (void **)(void *)region + top - taken, taken * sizeof *blocks);
    set_top(region, class, top - taken);
    return taken;
}

static size_t push_owned(char *region, uint32_t class, void *const *blocks, size_t count) {
    uint64_t top = get_top(region, class);
    uint64_t end = get(&stack_bounds_of(region, class)->end);
    if (top >= end) {
        return 0;
    }
    size_t given = end - top < count ? end - top : count;
    memcpy((void **)(void *)region + top, blocks, given * sizeof *blocks);
    set_top(region, class, top + given);
    return given;
}

/* A thread that finds itself alone needs no lock; nobody can appear before it leaves. */
static struct lock *enter_region(char **region) {
    unsigned number = locked_region();
    *region = region_of(&calm_caches, number);
    if (cpu_cache_is_alone()) {
        return NULL;
    }
    struct lock *lock = &calm_caches.states[number].lock;
    lock_acquire(lock);
    return lock;
}

size_t cpu_cache_pop_some(uint32_t class, void **blocks, size_t count) {
    if (cpu_cache_is_rseq()) {
        return rseq_pop_some(class, blocks, count);
    }
    if (atomic_load_explicit(&calm_caches.mode, memory_order_relaxed) != CACHE_LOCKED) {
        return 0;
    }
    char *region;
    struct lock *lock = enter_region(&region);
    size_t taken = pop_owned(region, class, blocks, count);
    if (lock != NULL) {
        lock_release(lock);
    }
    return taken;
}

size_t cpu_cache_push_some(uint32_t class, void *const *blocks, size_t count) {
    if (cpu_cache_is_rseq()) {
        return rseq_push_some(class, blocks, count);
    }
    if (atomic_load_explicit(&calm_caches.mode, memory_order_relaxed) != CACHE_LOCKED) {
        return 0;
    }
    char *region;
    struct lock *lock = enter_region(&region);
    size_t given = push_owned(region, class, blocks, count);
    if (lock != NULL) {
        lock_release(lock);
    }
    return given;
}

/*
 * Without a lock the stack changes meanwhile, and what is read is not one moment's. But what lies below a top
 * lay there when the top was read, or was pushed since; a block that its owner has never was.
 */
static bool is_newest(char *region, uint32_t class, const void *block) {
    if (get(&stack_bounds_of(region, class)->end) == 0) {
        return false;
    }
    uint64_t top = atomic_load_explicit(stack_top_of(region, class), memory_order_acquire);
    const volatile uintptr_t *words = (const volatile uintptr_t *)(void *)region;
    return words[top - 1] == (uintptr_t)block;
}

bool cpu_cache_is_newest(uint32_t class, const void *block) {
    if (cpu_cache_is_rseq()) {
        unsigned number = current_region();
        return number < calm_caches.count && is_newest(region_of(&calm_caches, number), class, block);
    }
    if (atomic_load_explicit(&calm_caches.mode, memory_order_relaxed) != CACHE_LOCKED) {
        return false;
    }
    char *region;
    struct lock *lock = enter_region(&region);
    bool found = is_newest(region, class, block);
    if (lock != NULL) {
        lock_release(lock);
    }
    return found;
}

static uint32_t add_one(_Atomic(uint8_t) *count) {
    uint32_t value = atomic_load_explicit(count, memory_order_relaxed);
    atomic_store_explicit(count, (uint8_t)(value < UINT8_MAX ? value + 1 : value), memory_order_relaxed);
    return value + 1;
}

void cpu_cache_ran_empty(uint32_t class) {
    unsigned number = calm_caches.states == NULL ? calm_caches.count : current_region();
    if (number < calm_caches.count) {
        add_one(&calm_caches.states[number].ran_empty[class]);
    }
}

/*
 * A higher end needs no farewell from sequences under way: one that read the lower end finds its cache full,
 * as it was.
 */
bool cpu_cache_ran_full(uint32_t class) {
    unsigned number = calm_caches.states == NULL ? calm_caches.count : current_region();
    if (number >= calm_caches.count) {
        return false;
    }
    struct region_state *state = &calm_caches.states[number];
    if (add_one(&state->ran_full[class]) < CACHE_TURNS ||
        atomic_load_explicit(&state->ran_empty[class], memory_order_relaxed) < CACHE_TURNS ||
        !lock_try(&state->lock)) {
        return false;
    }
    const struct size_class *of = &calm_caches.classes->of[class];
    struct stack_bounds *bounds = stack_bounds_of(region_of(&calm_caches, number), class);
    uint32_t start = calm_caches.start_of[class];
    uint32_t room = get(&bounds->end) - start;
    uint32_t wanted = room * 2 < of->grown_most ? room * 2 : of->grown_most;
    size_t bytes = (size_t)(wanted - room) * of->size;
    bool grows = atomic_load_explicit(&state->open, memory_order_relaxed) && wanted > room &&
                 state->grown_bytes + bytes <= GROWN_BYTES_MOST;
    if (grows) {
        state->grown_bytes += bytes;
        set(&bounds->end, start + wanted);
        atomic_store_explicit(&state->ran_full[class], 0, memory_order_relaxed);
        atomic_store_explicit(&state->ran_empty[class], 0, memory_order_relaxed);
    }
    lock_release(&state->lock);
    return grows;
}

size_t cpu_cache_magazine(uint32_t class) {
    const struct size_class *of = &calm_caches.classes->of[class];
    size_t least = of->batch;
    if (calm_caches.states == NULL || of->size < SIZE_MEDIUM_LEAST) {
        return least;
    }
    char *region = region_of(&calm_caches, current_region());
    /* A closed stack's end is 0: the difference is negative. */
    int64_t room = (int64_t)get(&stack_bounds_of(region, class)->end) - calm_caches.start_of[class];
    size_t half = room > 0 ? (size_t)room / 2 : 0;
    return half < least ? least : half < MAGAZINE_BLOCKS_MOST ? half : MAGAZINE_BLOCKS_MOST - 1;
}

/*
 * What did not run full and empty since the last look needs less room, down to what is in it. A sequence that
 * has just read the higher end may still push a block there. Under the region's lock.
 */
static void shrink(const struct cpu_caches *caches, struct region_state *state, char *region) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        const struct size_class *of = &caches->classes->of[class];
        struct stack_bounds *bounds = stack_bounds_of(region, class);
        uint32_t start = caches->start_of[class];
        uint32_t room = get(&bounds->end) - start;
        uint32_t least = of->cache_most;
        uint32_t held = (uint32_t)get_top(region, class) - start;
        uint32_t wanted = room / 2 > least ? room / 2 : least;
        wanted = wanted > held ? wanted : held;
        if (atomic_load_explicit(&state->ran_empty[class], memory_order_relaxed) == 0 && room > wanted) {
            set(&bounds->end, start + wanted);
            state->grown_bytes -= (size_t)(room - wanted) * of->size;
        }
        atomic_store_explicit(&state->ran_full[class], 0, memory_order_relaxed);
        atomic_store_explicit(&state->ran_empty[class], 0, memory_order_relaxed);
    }
}

/* Tops that are where they were tell of a region that nobody used, or used evenly; that is near enough. */
static uint64_t digest(const struct cpu_caches *caches, char *region) {
    uint64_t digest = 1;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        digest = digest * 0x9e3779b97f4a7c15ULL + get_top(region, class);
    }
    return digest;
}

static bool is_empty(const struct cpu_caches *caches, char *region) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        if (get_top(region, class) != caches->start_of[class]) {
            return false;
        }
    }
    return true;
}

/*
 * Closed first, so that no sequence that starts from now on changes a stack; then those under way are
 * restarted. After that the stacks are the drainer's, and what threads free meanwhile goes past the closed
 * region.
 */
size_t cpu_cache_drain(struct cpu_caches *caches, unsigned number, bool only_if_idle,
                       void (*put)(void *context, void *const *blocks, size_t count), void *context) {
    struct region_state *state = &caches->states[number];
    char *region = region_of(caches, number);
    if (!atomic_load_explicit(&state->open, memory_order_relaxed)) {
        return 0;
    }
    lock_acquire(&state->lock);
    uint64_t seen = digest(caches, region);
    state->idle_looks = seen == state->seen ? state->idle_looks + 1 : 0;
    state->seen = seen;
    bool idle = state->idle_looks >= CACHE_IDLE_LOOKS;
    if (only_if_idle) {
        shrink(caches, state, region);
    }
    if ((only_if_idle && !idle) || is_empty(caches, region)) {
        lock_release(&state->lock);
        return 0;
    }
    close_stacks(caches, region);
    if (cpu_cache_is_rseq() && !rseq_restart_all()) {
        for (uint32_t class = 1; class < caches->classes->count; ++class) {
            set_bottom(region, class, caches->start_of[class]);
            set(&stack_bounds_of(region, class)->end,
                caches->start_of[class] + caches->classes->of[class].cache_most);
        }
        state->grown_bytes = 0;
        lock_release(&state->lock);
        return 0;
    }
    size_t total = 0;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        uint64_t top = get_top(region, class);
        while (top > caches->start_of[class]) {
            void *blocks[DRAINED_AT_ONCE];
            uint64_t held = top - caches->start_of[class];
            uint64_t count = held < DRAINED_AT_ONCE ? held : DRAINED_AT_ONCE;
            top -= count;
            memcpy(blocks, (void **)(void *)region + top, count * sizeof *blocks);
            set_top(region, class, top);
            put(context, blocks, count);
            total += count;
        }
    }
    open_stacks(caches, state, region);
    state->seen = digest(caches, region);
    lock_release(&state->lock);
    atomic_fetch_add_explicit(&caches->drains, 1, memory_order_relaxed);
    return total;
}

size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        if (!atomic_load_explicit(&caches->states[number].open, memory_order_relaxed)) {
            continue;
        }
        for (uint32_t class = 1; class < caches->classes->count; ++class) {
            size_t held = (size_t)get_top(region_of(caches, number), class) - caches->start_of[class];
            blocks += held;
            *bytes += held * caches->classes->of[class].size;
        }
    }
    return blocks;
}

bool cpu_caches_are_held(const struct cpu_caches *caches) {
    bool held = false;
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        held |= lock_is_mine(&caches->states[number].lock);
    }
    return held;
}

void cpu_caches_before_fork(struct cpu_caches *caches, bool waits) {
    for (unsigned number = 0; caches->states != NULL && number < caches->count; number++) {
        struct region_state *state = &caches->states[number];
        if (atomic_load_explicit(&state->open, memory_order_relaxed)) {
            lock_acquire_for_fork(&state->lock, waits);
        }
    }
}

void cpu_caches_after_fork(struct cpu_caches *caches, bool child) {
    for (unsigned number = caches->count; caches->states != NULL && number-- > 0;) {
        struct region_state *state = &caches->states[number];
        lock_release_after_fork(&state->lock);
        /* One that is not open yet may not be writable, and looks empty and full as it is. */
        if (child && lock_reset_in_child(&state->lock) &&
            atomic_load_explicit(&state->open, memory_order_relaxed)) {
            close_stacks(caches, region_of(caches, number));
            atomic_store_explicit(&state->open, false, memory_order_relaxed);
        }
    }
}
