#include "cache/cpu_cache.h"

#include "base/assert.h"
#include "base/size.h"
#include "cache/rseq.h"
#include "os/filters.h"
#include "os/thread.h"
#include "os/vm.h"

#include <string.h>

/* Threads' stacks may be small. */
#define CACHE_FLUSH_BLOCKS 256
/* Where address space is limited, the caches take at most one part in so many of it. */
#define LIMIT_SHARE 32

/* glibc 2.32 and later. */
extern char __libc_single_threaded __attribute__((weak));

/* The words of a cache. */
static char *cpu_cache_words(const struct cpu_caches *caches, const struct cpu_cache_state *state) {
    return caches->base + ((size_t)(state - caches->states) << CPU_CACHE_SHIFT);
}

/* A word of a stack: written under the cache's lock, or by a sequence of the CPU's own thread. */
static void **get_top(const struct stack *stack) {
    return atomic_load_explicit(&stack->top, memory_order_relaxed);
}

static void set_top(struct stack *stack, void **top) {
    atomic_store_explicit(&stack->top, top, memory_order_release);
}

/* Of a closed stack: above any top. */
static void **get_bottom(const struct stack *stack) {
    return (void **)~atomic_load_explicit(&stack->not_bottom, memory_order_relaxed);
}

static void set_bottom(struct stack *stack, void **bottom) {
    atomic_store_explicit(&stack->not_bottom, ~(uintptr_t)bottom, memory_order_release);
}

static void **get_end(const struct stack *stack) {
    return atomic_load_explicit(&stack->end, memory_order_relaxed);
}

static void set_end(struct stack *stack, void **end) {
    atomic_store_explicit(&stack->end, end, memory_order_release);
}

static size_t words_between(void *const *low, void *const *high) {
    return low < high ? (size_t)(high - low) : 0;
}

static bool is_open(const struct cpu_cache_state *state) {
    return atomic_load_explicit(&state->open, memory_order_relaxed);
}

static int mode_of(const struct cpu_caches *caches) {
    return atomic_load_explicit(&caches->mode, memory_order_relaxed);
}

/* The caches that there is memory for. */
static unsigned usable(const struct cpu_caches *caches) {
    return caches->states == NULL ? 0 : caches->count;
}

bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes,
                     struct rseq_offsets rseq) {
    if (&__libc_single_threaded != NULL) {
        thread_alone = &__libc_single_threaded;
    }
    caches->classes = classes;
    caches->rseq = rseq;
    size_t limit = vm_limit_bytes();
    size_t max_count = size_minus(limit / LIMIT_SHARE / CPU_CACHE_BYTES, CLOSED_CACHES);
    caches->count = limit == SIZE_MAX ? cpus_possible() : cpus_listed(); /* which reads files */
    caches->one_per_cpu = caches->count <= max_count;
    if (!caches->one_per_cpu) {
        caches->count = max_count == 0 ? 1 : (unsigned)max_count;
    }

    /* Between stacks is a word that is never written: what a push to an empty one compares its block with. */
    uint32_t next = 3 * SIZE_CLASSES;
    for (uint32_t class = 1; class < classes->count; ++class) {
        caches->start_of[class] = (uint16_t)(next + 1);
        next += 1 + classes->of[class].max_cached;
    }
    for (uint32_t class = 1; class < classes->count; ++class) {
        caches->grown_start_of[class] = (uint16_t)(next + 1);
        next += 1 + classes->of[class].max_grown;
    }
    if (next > CPU_CACHE_BYTES / 8) {
        return false;
    }
    calm_assert(caches->count > 0, caches->count);
    size_t bytes = ((size_t)caches->count + CLOSED_CACHES) * CPU_CACHE_BYTES;
    caches->base = vm_reserve(bytes);
    if (caches->base == NULL) {
        return false;
    }
    /* The fast path reads closed caches. */
    vm_make_readable(caches->base, bytes);
    caches->states = vm_map(caches->count * sizeof *caches->states);
    for (unsigned number = 0; number < usable(caches); number++) {
        lock_set_rank(&caches->states[number].lock, LOCK_CPU_CACHE);
    }
    return caches->states != NULL;
}

void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode, bool may_be_alone) {
    calm_assert(mode_of(caches) == CACHE_UNREADY && mode != CACHE_UNREADY, mode_of(caches), mode);
    atomic_store_explicit(&caches->mode, mode, memory_order_release);
    if (mode == CACHE_LOCKED && may_be_alone) {
        caches->alone_without_helper = thread_alone;
        cpu_caches_set_helper(caches, false);
    }
    caches->in_rseq_mode = mode == CACHE_RSEQ;
}

void cpu_caches_set_helper(struct cpu_caches *caches, bool runs) {
    const char *alone = runs ? &thread_not_alone : caches->alone_without_helper;
    if (atomic_load_explicit(&caches->alone, memory_order_relaxed) != alone) {
        atomic_store_explicit(&caches->alone, alone, memory_order_release);
        if (caches->shared != NULL) {
            atomic_store_explicit(&caches->shared->alone, alone, memory_order_release);
        }
    }
}

void cpu_caches_share(struct cpu_caches *caches, struct cpu_caches *shared) {
    shared->base = caches->base;
    shared->rseq = caches->rseq;
    atomic_store_explicit(&shared->alone, atomic_load_explicit(&caches->alone, memory_order_relaxed),
                          memory_order_release);
    shared->in_rseq_mode = caches->in_rseq_mode;
    caches->shared = shared;
}

/* Those without a CPU are never read, but where the threads' numbers are not those of CPUs. Pages next to
 * caches that stay are left as guards. */
void cpu_caches_limit(struct cpu_caches *caches) {
    if (usable(caches) == 0 || !cpu_cache_is_rseq(caches) || !thread_may_open_files() ||
        atomic_exchange_explicit(&caches->limited, true, memory_order_relaxed)) {
        return;
    }
    size_t guard = vm_page_size();
    size_t listed = cpus_listed();
    if (listed < caches->count) {
        size_t bytes = (caches->count - listed) * CPU_CACHE_BYTES;
        vm_release(caches->base + listed * CPU_CACHE_BYTES + 2 * guard, bytes - 4 * guard);
    }
}

size_t cpu_caches_max_blocks(const struct cpu_caches *caches, size_t *bytes) {
    size_t open = 0;
    for (unsigned number = 0; number < usable(caches); number++) {
        open += is_open(&caches->states[number]);
    }
    size_t blocks = 0;
    *bytes = MAX_GROWN_BYTES * open;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        const struct size_class *of = &caches->classes->of[class];
        blocks += of->max_grown * open;
        *bytes += (size_t)of->max_cached * of->size * open;
    }
    return blocks;
}

size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes) {
    size_t blocks = 0;
    *bytes = 0;
    for (unsigned number = 0; number < usable(caches); number++) {
        const struct cpu_cache_state *state = &caches->states[number];
        for (uint32_t class = 1; is_open(state) && class < caches->classes->count; ++class) {
            const struct size_class *of = &caches->classes->of[class];
            const struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
            /* Of two moments, if the stack is being moved. */
            size_t held = size_min(words_between(get_bottom(stack), get_top(stack)), of->max_grown);
            blocks += held;
            *bytes += held * of->size;
        }
    }
    return blocks;
}

static uint32_t read_rseq(ptrdiff_t offset) {
    return *(const volatile uint32_t *)(const void *)((const char *)thread_pointer() + offset);
}

/* In CACHE_LOCKED threads share a cache where their thread pointers hash to the same one: a lock is held for
 * a few instructions. A lone thread has the first. */
unsigned cpu_cache_number(const struct cpu_caches *caches) {
    if (cpu_cache_is_rseq(caches)) {
        return read_rseq(caches->rseq.cpu_number);
    }
    return cpu_cache_is_alone(caches) ? 0 : thread_slot(caches->count);
}

unsigned cpu_cache_node(const struct cpu_caches *caches) {
    return caches->rseq.node != 0 && cpu_cache_is_rseq(caches) ? read_rseq(caches->rseq.node) : 0;
}

/* The caller's cache; NULL if its thread is not registered, or without memory. */
static struct cpu_cache_state *own_state(const struct cpu_caches *caches) {
    unsigned number = cpu_cache_number(caches);
    return number < usable(caches) ? &caches->states[number] : NULL;
}

static void **word_of(char *cache, uint32_t index) {
    return (void **)(void *)cache + index;
}

/* Of a stack, whether it is open or closed. Under the cache's lock. */
static void **start_of(const struct cpu_caches *caches, const struct cpu_cache_state *state, uint32_t class) {
    return word_of(cpu_cache_words(caches, state),
                   state->moved[class] ? caches->grown_start_of[class] : caches->start_of[class]);
}

static void close_stack(struct stack *stack) {
    set_bottom(stack, (void **)UINTPTR_MAX);
    set_end(stack, NULL);
}

static void close_stacks(const struct cpu_caches *caches, char *cache) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        close_stack(stack_of(cache, class));
    }
}

/*
 * Opens a closed cache. are_empty: no sequence is under way, and its stacks, empty, have no room at first;
 * else it is as it was, without what it had grown. Under the cache's lock.
 */
static void open_stacks(const struct cpu_caches *caches, struct cpu_cache_state *state, bool are_empty) {
    calm_assert(lock_is_mine(&state->lock), state - caches->states);
    char *cache = cpu_cache_words(caches, state);
    state->grown_bytes = 0;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        struct stack *stack = stack_of(cache, class);
        state->moved[class] = state->moved[class] && !are_empty;
        void **start = start_of(caches, state, class);
        if (are_empty) {
            /* A first opening: in this order a sequence finds either nothing to pop or no room to push. */
            set_bottom(stack, (void **)UINTPTR_MAX);
            set_top(stack, start);
        }
        set_bottom(stack, start);
        set_end(stack, are_empty ? start : start + caches->classes->of[class].max_cached);
    }
}

bool cpu_cache_open(struct cpu_caches *caches, uint32_t class) {
    calm_assert(class > 0 && class < caches->classes->count, class);
    struct cpu_cache_state *state = mode_of(caches) == CACHE_OFF ? NULL : own_state(caches);
    if (state == NULL) {
        return false;
    }
    char *cache = cpu_cache_words(caches, state);
    struct stack *stack = stack_of(cache, class);
    void **start = word_of(cache, caches->start_of[class]);
    if (is_open(state) && get_end(stack) != start) {
        return false;
    }
    lock_acquire(&state->lock);
    if (!is_open(state) && vm_commit(cache, CPU_CACHE_BYTES)) {
        open_stacks(caches, state, true);
        atomic_store_explicit(&state->open, true, memory_order_relaxed);
    }
    bool opens = is_open(state) && get_end(stack) == start;
    if (opens) {
        set_end(stack, start + caches->classes->of[class].max_cached);
    }
    lock_release(&state->lock);
    return opens;
}

/*
 * The words of the caller's cache in CACHE_LOCKED, for its exclusive use until cpu_cache_leave; NULL in other
 * modes. A single-threaded process needs no lock: no second thread can start before this one returns.
 */
static char *cpu_cache_enter(struct cpu_caches *caches, struct lock **lock) {
    *lock = NULL;
    if (mode_of(caches) != CACHE_LOCKED) {
        return NULL;
    }
    struct cpu_cache_state *state = &caches->states[cpu_cache_number(caches)];
    if (!cpu_cache_is_alone(caches)) {
        *lock = &state->lock;
        lock_acquire(*lock);
    }
    return cpu_cache_words(caches, state);
}

static void cpu_cache_leave(struct lock *lock) {
    if (lock != NULL) {
        lock_release(lock);
    }
}

static size_t pop_exclusive(struct stack *stack, void **blocks, size_t count) {
    void **top = get_top(stack);
    size_t taken = size_min(words_between(get_bottom(stack), top), count);
    calm_assert(taken <= count && taken <= MAX_GROWN_BLOCKS, taken, count);
    if (taken > 0) {
        memcpy(blocks, top - taken, taken * sizeof *blocks);
        set_top(stack, top - taken);
    }
    return taken;
}

static size_t push_exclusive(struct stack *stack, void *const *blocks, size_t count) {
    void **top = get_top(stack);
    size_t given = size_min(words_between(top, get_end(stack)), count);
    calm_assert(given <= count && given <= MAX_GROWN_BLOCKS, given, count);
    if (given > 0) {
        memcpy(top, blocks, given * sizeof *blocks);
        set_top(stack, top + given);
    }
    return given;
}

size_t cpu_cache_pop_some(struct cpu_caches *caches, uint32_t class, void **blocks, size_t count) {
    if (cpu_cache_is_rseq(caches)) {
        return rseq_pop_some(caches, class, blocks, count);
    }
    struct lock *lock;
    char *cache = cpu_cache_enter(caches, &lock);
    size_t taken = cache == NULL ? 0 : pop_exclusive(stack_of(cache, class), blocks, count);
    cpu_cache_leave(lock);
    return taken;
}

size_t cpu_cache_push_some(struct cpu_caches *caches, uint32_t class, void *const *blocks, size_t count) {
    if (cpu_cache_is_rseq(caches)) {
        return rseq_push_some(caches, class, blocks, count);
    }
    struct lock *lock;
    char *cache = cpu_cache_enter(caches, &lock);
    size_t given = cache == NULL ? 0 : push_exclusive(stack_of(cache, class), blocks, count);
    cpu_cache_leave(lock);
    return given;
}

/*
 * Without a lock the stack changes meanwhile, and the words are not read at one moment. But the block below a
 * top was there when the top was read, or was pushed since; a block that its owner has never was.
 */
bool cpu_cache_is_newest(struct cpu_caches *caches, uint32_t class, const void *block) {
    struct lock *lock;
    char *cache = cpu_cache_enter(caches, &lock);
    const struct cpu_cache_state *state = cpu_cache_is_rseq(caches) ? own_state(caches) : NULL;
    if (state != NULL) {
        cache = cpu_cache_words(caches, state);
    }
    bool found = false;
    const struct stack *stack = cache == NULL ? NULL : stack_of(cache, class);
    /* The acquire: a stack that has an end has had a top. */
    if (stack != NULL && atomic_load_explicit(&stack->end, memory_order_acquire) != NULL) {
        void *const volatile *top = get_top(stack);
        found = top[-1] == block;
    }
    cpu_cache_leave(lock);
    return found;
}

void cpu_cache_ran_empty(struct cpu_caches *caches, uint32_t class) {
    struct cpu_cache_state *state = own_state(caches);
    if (state != NULL) {
        turns_note(&state->turns[class].empty);
    }
}

/*
 * Moves an open stack to where it may grow: stacks that do not grow are close to each other, so that a
 * program that needs little touches few pages. As in cpu_cache_flush, the stack is closed meanwhile, and no
 * sequence is under way on it. False, and it stays, if those cannot be restarted. Under the cache's lock.
 */
static bool move_stack(const struct cpu_caches *caches, struct cpu_cache_state *state, uint32_t class) {
    calm_assert(lock_is_mine(&state->lock) && !state->moved[class], class);
    struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
    void **from = start_of(caches, state, class);
    ptrdiff_t room = get_end(stack) - from;
    close_stack(stack);
    state->moved[class] = !cpu_cache_is_rseq(caches) || rseq_restart_all();
    void **to = start_of(caches, state, class);
    if (state->moved[class]) {
        ptrdiff_t held = get_top(stack) - from;
        calm_assert(held >= 0 && held <= caches->classes->of[class].max_cached, class, held);
        memcpy(to, from, (size_t)held * sizeof *to);
        set_top(stack, to + held);
    }
    set_bottom(stack, to);
    set_end(stack, to + room);
    return state->moved[class];
}

/* Sequences under way need not be restarted for a higher end: one that read the lower end finds its cache
 * full, as it was. */
bool cpu_cache_ran_full(struct cpu_caches *caches, uint32_t class) {
    struct cpu_cache_state *state = own_state(caches);
    if (state == NULL) {
        return false;
    }
    turns_note(&state->turns[class].full);
    if (!turns_are_due(&state->turns[class]) || !lock_try(&state->lock)) {
        return false;
    }
    const struct size_class *of = &caches->classes->of[class];
    struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
    size_t room = words_between(start_of(caches, state, class), get_end(stack));
    size_t wanted = size_min(room * 2, of->max_grown);
    size_t bytes = (wanted - room) * of->size;
    bool grows = is_open(state) && wanted > room && state->grown_bytes + bytes <= MAX_GROWN_BYTES &&
                 (state->moved[class] || move_stack(caches, state, class));
    if (grows) {
        state->grown_bytes += bytes;
        set_end(stack, start_of(caches, state, class) + wanted);
        calm_assert(wanted <= of->max_grown && state->grown_bytes <= MAX_GROWN_BYTES, class, wanted);
        turns_restart(&state->turns[class]);
    } else {
        /* Tried again after as many more. That it ran empty stays known to the next check. */
        turns_set(&state->turns[class].full, 0);
    }
    lock_release(&state->lock);
    return grows;
}

size_t cpu_cache_magazine(const struct cpu_caches *caches, uint32_t class) {
    if (mode_of(caches) == CACHE_OFF) {
        return 1;
    }
    const struct size_class *of = &caches->classes->of[class];
    const struct cpu_cache_state *state = own_state(caches);
    if (state == NULL) {
        return 1;
    }
    const struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
    size_t half = words_between(get_bottom(stack), get_end(stack)) / 2;
    return size_max(size_min(half, MAX_MAGAZINE_BLOCKS - 1), of->batch);
}

/*
 * A stack that did not run empty since the last check needs less room, down to what is in it. A sequence that
 * has just read the higher end may still push a block there. Under the cache's lock.
 */
static void cpu_cache_shrink(const struct cpu_caches *caches, struct cpu_cache_state *state) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        const struct size_class *of = &caches->classes->of[class];
        struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
        void **start = start_of(caches, state, class);
        size_t room = words_between(start, get_end(stack));
        size_t held = words_between(start, get_top(stack));
        size_t wanted = size_max(size_max(room / 2, of->max_cached), held);
        if (turns_get(&state->turns[class].empty) == 0 && room > wanted) {
            set_end(stack, start + wanted);
            calm_assert(state->grown_bytes >= (room - wanted) * of->size, class, state->grown_bytes, room,
                        wanted);
            state->grown_bytes -= (room - wanted) * of->size;
        }
        turns_restart(&state->turns[class]);
    }
}

/* The same digest as before means a cache that was not used, or used evenly, which is near enough. That of an
 * empty cache is 0; any other is with a chance of one in 2^64. */
static uint64_t digest(const struct cpu_caches *caches, const struct cpu_cache_state *state) {
    uint64_t digest = 0;
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        const struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
        uint64_t held = words_between(start_of(caches, state, class), get_top(stack));
        digest = digest * RANDOM_GOLDEN_RATIO + held;
    }
    return digest;
}

/* Empties the stacks of a closed cache that no sequence uses. */
static void empty_stacks(const struct cpu_caches *caches, const struct cpu_cache_state *state,
                         put_flushed *put, void *context) {
    for (uint32_t class = 1; class < caches->classes->count; ++class) {
        struct stack *stack = stack_of(cpu_cache_words(caches, state), class);
        void **start = start_of(caches, state, class);
        for (void **top; (top = get_top(stack)) > start;) {
            void *blocks[CACHE_FLUSH_BLOCKS];
            size_t count = size_min(words_between(start, top), CACHE_FLUSH_BLOCKS);
            memcpy(blocks, top - count, count * sizeof *blocks);
            set_top(stack, top - count);
            calm_assert(count > 0 && count <= CACHE_FLUSH_BLOCKS && lock_is_mine(&state->lock), class, count);
            put(context, blocks, count);
        }
    }
}

/* Closes the cache first, so that no sequence that begins from now on changes a stack; then restarts those
 * under way. What threads free meanwhile goes past the closed cache. */
void cpu_cache_flush(struct cpu_caches *caches, unsigned number, bool only_if_idle, put_flushed *put,
                     void *context) {
    calm_assert(number < caches->count && put != NULL, number, caches->count);
    struct cpu_cache_state *state = &caches->states[number];
    char *cache = cpu_cache_words(caches, state);
    if (!is_open(state)) {
        return;
    }
    lock_acquire(&state->lock);
    calm_assert(state->grown_bytes <= MAX_GROWN_BYTES, number, state->grown_bytes);
    uint64_t found = digest(caches, state);
    state->idle_checks = found == state->digest ? state->idle_checks + 1 : 0;
    state->digest = found;
    if (only_if_idle) {
        cpu_cache_shrink(caches, state);
    }
    if ((!only_if_idle || state->idle_checks >= CACHE_IDLE_CHECKS) && found != 0) {
        close_stacks(caches, cache);
        bool restarted = !cpu_cache_is_rseq(caches) || rseq_restart_all();
        if (restarted) {
            empty_stacks(caches, state, put, context);
            state->digest = 0;
            atomic_fetch_add_explicit(&caches->flushes, 1, memory_order_relaxed);
        }
        open_stacks(caches, state, restarted);
    }
    lock_release(&state->lock);
}

bool cpu_caches_are_held(const struct cpu_caches *caches) {
    bool held = false;
    for (unsigned number = 0; number < usable(caches); number++) {
        held |= lock_is_mine(&caches->states[number].lock);
    }
    return held;
}

void cpu_caches_before_fork(struct cpu_caches *caches, bool waits) {
    for (unsigned number = 0; number < usable(caches); number++) {
        if (is_open(&caches->states[number])) {
            lock_acquire_for_fork(&caches->states[number].lock, waits);
        }
    }
}

void cpu_caches_after_fork(struct cpu_caches *caches, bool child) {
    for (unsigned number = usable(caches); number-- > 0;) {
        struct cpu_cache_state *state = &caches->states[number];
        lock_release_after_fork(&state->lock);
        /* A cache that is not open may not be writable, and looks empty and full as it is. */
        if (child && lock_reset_in_child(&state->lock) && is_open(state)) {
            close_stacks(caches, cpu_cache_words(caches, state));
            atomic_store_explicit(&state->open, false, memory_order_relaxed);
        }
    }
}
