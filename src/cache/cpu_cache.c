#include "cache/cpu_cache.h"

#include "base/assert.h"
#include "base/size.h"
#include "cache/locked.h"
#include "cache/rseq.h"
#include "os/filters.h"
#include "os/thread.h"
#include "os/vm.h"

#include <string.h>

/* The size of an array on the stack of the thread that flushes. That stack may
 * be small. */
#define CACHE_FLUSH_BLOCKS 256
/* If address space is limited, the caches take at most this part of it. */
#define LIMIT_DIVISOR 32
/* The number of a cache's first word behind the three arrays. */
#define FIRST_WORD ((size_t)3 * SIZE_CLASSES)

/* glibc 2.32 and later define it. */
extern char __libc_single_threaded __attribute__((weak));

static int mode_of(const struct cpu_caches *caches) {
    return atomic_load_explicit(&caches->mode, memory_order_relaxed);
}

/* Returns the number of caches, or 0 if there was no memory for them. */
static unsigned usable(const struct cpu_caches *caches) {
    return caches->states == NULL ? 0 : caches->count;
}

bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes,
                     struct rseq_offsets rseq) {
    if (&__libc_single_threaded != NULL) {
        thread_single = &__libc_single_threaded;
    }
    caches->classes = classes;
    caches->rseq = rseq;
    size_t limit = vm_limit_bytes();
    size_t max_count = size_minus(limit / LIMIT_DIVISOR / CPU_CACHE_BYTES, CLOSED_CACHES);
    caches->count = limit == SIZE_MAX ? cpus_possible() : cpus_listed(); /* cpus_listed reads files */
    caches->one_per_cpu = caches->count <= max_count;
    if (!caches->one_per_cpu) {
        caches->count = max_count == 0 ? 1 : (unsigned)max_count;
    }

    size_t words = FIRST_WORD;
    for (uint32_t size_class = 1; size_class < classes->count; ++size_class) {
        words += 2 + classes->of[size_class].max_cached + classes->of[size_class].max_grown;
    }
    if (words > CPU_CACHE_BYTES / 8) {
        return false;
    }
    calm_assert(caches->count > 0, caches->count);
    size_t bytes = ((size_t)caches->count + CLOSED_CACHES) * CPU_CACHE_BYTES;
    char *words_of_all = vm_reserve(bytes);
    if (words_of_all == NULL) {
        return false;
    }
    /* The fast path also reads caches that were never opened. */
    vm_make_readable(words_of_all, bytes);
    caches->states = vm_map(caches->count * sizeof *caches->states);
    if (caches->states == NULL) {
        vm_release(words_of_all, bytes);
        return false;
    }
    caches->base = words_of_all + CLOSED_CACHES * CPU_CACHE_BYTES;
    lock_set_rank(&caches->opening, LOCK_CACHE_OPENING);
    for (unsigned number = 0; number < usable(caches); number++) {
        lock_set_rank(&caches->states[number].lock, LOCK_CPU_CACHE);
    }
    return true;
}

void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode) {
    calm_assert(mode_of(caches) == CACHE_UNREADY && mode != CACHE_UNREADY, mode_of(caches), mode);
    atomic_store_explicit(&caches->mode, mode, memory_order_release);
    if (mode == CACHE_LOCKED) {
        caches->single_without_helper = thread_single;
        cpu_caches_set_helper(caches, false);
    }
    caches->in_rseq_mode = mode == CACHE_RSEQ;
}

void cpu_caches_set_helper(struct cpu_caches *caches, bool runs) {
    const char *single = runs ? &thread_not_single : caches->single_without_helper;
    if (atomic_load_explicit(&caches->single, memory_order_relaxed) != single) {
        atomic_store_explicit(&caches->single, single, memory_order_release);
        if (caches->shared != NULL) {
            atomic_store_explicit(&caches->shared->single, single, memory_order_release);
        }
    }
}

void cpu_caches_share(struct cpu_caches *caches, struct cpu_caches *shared) {
    shared->base = caches->base;
    shared->rseq = caches->rseq;
    atomic_store_explicit(&shared->single, atomic_load_explicit(&caches->single, memory_order_relaxed),
                          memory_order_release);
    shared->in_rseq_mode = caches->in_rseq_mode;
    caches->shared = shared;
}

/* In CACHE_RSEQ no thread reads a cache whose number is not that of a CPU. The
 * pages next to caches that stay become guards. */
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
        open += cpu_cache_is_open(&caches->states[number]);
    }
    size_t blocks = 0;
    *bytes = MAX_GROWN_BYTES * open;
    for (uint32_t size_class = 1; size_class < caches->classes->count; ++size_class) {
        const struct size_class *of = &caches->classes->of[size_class];
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
        for (uint32_t size_class = 1; cpu_cache_is_open(state) && size_class < caches->classes->count;
             ++size_class) {
            const struct size_class *of = &caches->classes->of[size_class];
            const struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
            /* While the stack moves, one of the two words may be new and the
             * other one old. */
            size_t held = size_min(words_between(stack_bottom(stack), stack_top(stack)), of->max_grown);
            blocks += held;
            *bytes += held * of->size;
        }
    }
    return blocks;
}

unsigned cpu_cache_number(const struct cpu_caches *caches) {
    return cpu_cache_is_rseq(caches) ? rseq_number(caches) : locked_number(caches);
}

unsigned cpu_cache_place(const struct cpu_caches *caches) {
    unsigned number = cpu_cache_number(caches);
    return (int)number < 0 ? thread_slot(caches->count) : number;
}

unsigned cpu_cache_node(const struct cpu_caches *caches) {
    return cpu_cache_is_rseq(caches) ? rseq_node(caches) : 0;
}

/* Returns the caller's cache, or NULL if the thread is not registered for
 * sequences, or if there was no memory for caches. */
static struct cpu_cache_state *own_state(const struct cpu_caches *caches) {
    unsigned number = cpu_cache_number(caches);
    return number < usable(caches) ? &caches->states[number] : NULL;
}

/* Returns the first word of a stack that has room. The caller holds the cache's
 * lock. */
static void **start_of(const struct cpu_caches *caches, const struct cpu_cache_state *state,
                       uint32_t size_class) {
    calm_assert(state->start[size_class] > FIRST_WORD, size_class);
    return (void **)(void *)cpu_cache_words(caches, state) + state->start[size_class];
}

/* Returns the caller's cache, after an attempt to register a thread that was
 * not registered yet. */
static struct cpu_cache_state *own_state_registered(const struct cpu_caches *caches) {
    bool registers =
        cpu_cache_is_rseq(caches) && caches->rseq.own && (int)cpu_cache_number(caches) == RSEQ_UNREGISTERED;
    return registers && !rseq_register() ? NULL : own_state(caches);
}

/* Returns the next class whose stack has room, or the number of classes. */
static uint32_t class_after(const struct cpu_caches *caches, const struct cpu_cache_state *state,
                            uint32_t size_class) {
    do {
        size_class++;
    } while (size_class < caches->classes->count && state->start[size_class] == 0);
    return size_class;
}

/*
 * Gives a closed stack the next words of the cache. So the stacks that a program
 * uses are close to each other, and it touches few pages. A push to an empty
 * stack compares its block with the word below, which belongs to no stack. That
 * word may have a block in it from before a flush. The caller holds the cache's
 * lock.
 */
static void give_room(const struct cpu_caches *caches, struct cpu_cache_state *state, uint32_t size_class,
                      size_t words) {
    __atomic_store_n(&state->start[size_class], (uint16_t)(state->next + 1), __ATOMIC_RELAXED);
    state->next = (uint16_t)(state->next + 1 + words);
    calm_assert(lock_is_mine(&state->lock) && state->next <= CPU_CACHE_BYTES / 8, size_class, state->next);
    start_of(caches, state, size_class)[-1] = NULL;
}

/* Takes the room from all stacks. They are closed, and their blocks were
 * flushed, or lost at a fork. */
static void take_room(struct cpu_cache_state *state) {
    state->next = FIRST_WORD;
    state->grown_bytes = 0;
    for (uint32_t size_class = 0; size_class < SIZE_CLASSES; size_class++) {
        __atomic_store_n(&state->start[size_class], 0, __ATOMIC_RELAXED);
        state->moved[size_class] = false;
        turns_restart(&state->turns[size_class]);
    }
}

/* Restarts the sequences under way. Once it returns true, no sequence is left
 * that began before the caller closed a stack or cache. */
static bool sequences_are_over(const struct cpu_caches *caches) {
    return !cpu_cache_is_rseq(caches) || rseq_restart_all();
}

static void close_stack(struct stack *stack) {
    stack_set_bottom(stack, (void **)UINTPTR_MAX);
    stack_set_end(stack, NULL);
}

static void close_stacks(const struct cpu_caches *caches, char *cache) {
    for (uint32_t size_class = 1; size_class < caches->classes->count; ++size_class) {
        close_stack(stack_of(cache, size_class));
    }
}

/* Opens a closed stack. The caller has set its top, so a sequence that finds
 * the stack open also finds the top. */
static void open_stack(struct stack *stack, void **start, size_t room) {
    stack_set_bottom(stack, start);
    stack_set_end(stack, start + room);
}

/* Opens the stacks that have room. They keep their blocks, and lose the room by
 * which they had grown. */
static void reopen_stacks(const struct cpu_caches *caches, struct cpu_cache_state *state) {
    state->grown_bytes = 0;
    for (uint32_t size_class = class_after(caches, state, 0); size_class < caches->classes->count;
         size_class = class_after(caches, state, size_class)) {
        open_stack(stack_of(cpu_cache_words(caches, state), size_class), start_of(caches, state, size_class),
                   caches->classes->of[size_class].max_cached);
    }
}

/* Opens a cache, unless another thread opens one, or forks. Returns whether the
 * cache is open. The function does not wait: the caller may be a fork handler
 * that runs while the fork holds all locks but those of closed caches. */
static bool open_cache(struct cpu_caches *caches, struct cpu_cache_state *state) {
    if (!cpu_cache_is_open(state) && lock_try(&caches->opening)) {
        if (!cpu_cache_is_open(state) && vm_commit(cpu_cache_words(caches, state), CPU_CACHE_BYTES)) {
            take_room(state);
            atomic_store_explicit(&state->open, true, memory_order_release);
        }
        lock_release(&caches->opening);
    }
    return cpu_cache_is_open(state);
}

bool cpu_cache_open(struct cpu_caches *caches, uint32_t size_class) {
    calm_assert(size_class > 0 && size_class < caches->classes->count, size_class);
    struct cpu_cache_state *state = mode_of(caches) == CACHE_OFF ? NULL : own_state_registered(caches);
    if (state == NULL || !open_cache(caches, state) || cpu_cache_start(state, size_class) != 0) {
        return false; /* a flush may have closed the stack; the caller then bypasses it */
    }
    lock_acquire(&state->lock);
    bool opens = state->start[size_class] == 0;
    if (opens) {
        struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
        size_t room = caches->classes->of[size_class].max_cached;
        give_room(caches, state, size_class, room);
        void **start = start_of(caches, state, size_class);
        stack_set_top(stack, start);
        open_stack(stack, start, room);
    }
    lock_release(&state->lock);
    return opens;
}

size_t cpu_cache_pop_some(struct cpu_caches *caches, uint32_t size_class, void **blocks, size_t count) {
    if (cpu_cache_is_rseq(caches)) {
        return rseq_pop_some(caches, size_class, blocks, count);
    }
    return mode_of(caches) == CACHE_LOCKED ? locked_pop_some(caches, size_class, blocks, count) : 0;
}

size_t cpu_cache_push_some(struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                           size_t count) {
    if (cpu_cache_is_rseq(caches)) {
        return rseq_push_some(caches, size_class, blocks, count);
    }
    return mode_of(caches) == CACHE_LOCKED ? locked_push_some(caches, size_class, blocks, count) : 0;
}

bool cpu_cache_is_newest(struct cpu_caches *caches, uint32_t size_class, const void *block) {
    if (cpu_cache_is_rseq(caches)) {
        const struct cpu_cache_state *state = own_state(caches);
        return state != NULL && stack_has_newest(stack_of(cpu_cache_words(caches, state), size_class), block);
    }
    return mode_of(caches) == CACHE_LOCKED && locked_has_newest(caches, size_class, block);
}

void cpu_cache_ran_empty(struct cpu_caches *caches, uint32_t size_class) {
    struct cpu_cache_state *state = own_state(caches);
    if (state != NULL) {
        turns_note(&state->turns[size_class].empty);
    }
}

/*
 * Moves an open stack to where it may grow. As in cpu_cache_flush, the stack is
 * closed meanwhile, and no sequence is under way on it. If sequences cannot be
 * restarted, returns false, and the stack stays where it is. The caller holds
 * the cache's lock.
 */
static bool move_stack(const struct cpu_caches *caches, struct cpu_cache_state *state, uint32_t size_class) {
    calm_assert(lock_is_mine(&state->lock) && !state->moved[size_class], size_class);
    struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
    void **start = start_of(caches, state, size_class);
    size_t room = words_between(start, stack_end(stack));
    close_stack(stack);
    state->moved[size_class] = sequences_are_over(caches);
    if (state->moved[size_class]) {
        void **from = start;
        size_t held = words_between(from, stack_top(stack));
        calm_assert(held <= caches->classes->of[size_class].max_cached, size_class, held);
        give_room(caches, state, size_class, caches->classes->of[size_class].max_grown);
        start = start_of(caches, state, size_class);
        memcpy(start, from, held * sizeof *start);
        stack_set_top(stack, start + held);
    }
    open_stack(stack, start, room);
    return state->moved[size_class];
}

/* A stack's end can be raised without a restart of the sequences. A sequence
 * that has read the lower end finds the stack full, as it was. */
bool cpu_cache_ran_full(struct cpu_caches *caches, uint32_t size_class) {
    struct cpu_cache_state *state = own_state(caches);
    if (state == NULL) {
        return false;
    }
    turns_note(&state->turns[size_class].full);
    if (!turns_are_due(&state->turns[size_class]) || !lock_try(&state->lock)) {
        return false;
    }
    const struct size_class *of = &caches->classes->of[size_class];
    struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
    size_t room = words_between(stack_bottom(stack), stack_end(stack)); /* 0 if a flush has closed it */
    size_t wanted = size_min(room * 2, of->max_grown);
    size_t bytes = (wanted - room) * of->size;
    bool grows = wanted > room && state->grown_bytes + bytes <= MAX_GROWN_BYTES &&
                 (state->moved[size_class] || move_stack(caches, state, size_class));
    if (grows) {
        state->grown_bytes += bytes;
        stack_set_end(stack, start_of(caches, state, size_class) + wanted);
        calm_assert(wanted <= of->max_grown && state->grown_bytes <= MAX_GROWN_BYTES, size_class, wanted);
        turns_restart(&state->turns[size_class]);
    } else {
        /* The stack tries to grow again after it was full as many times once
         * more. The number of times that it ran empty stays, for the next
         * check. */
        turns_set(&state->turns[size_class].full, 0);
    }
    lock_release(&state->lock);
    return grows;
}

size_t cpu_cache_magazine(const struct cpu_caches *caches, uint32_t size_class) {
    if (mode_of(caches) == CACHE_OFF) {
        return 1;
    }
    const struct size_class *of = &caches->classes->of[size_class];
    const struct cpu_cache_state *state = own_state(caches);
    if (state == NULL) {
        return 1;
    }
    const struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
    size_t half = words_between(stack_bottom(stack), stack_end(stack)) / 2;
    return size_max(size_min(half, MAX_MAGAZINE_BLOCKS - 1), of->batch);
}

size_t cpu_cache_refill(struct cpu_caches *caches, uint32_t size_class, void **block) {
    if (cpu_cache_pop_some(caches, size_class, block, 1) == 1) {
        return 0;
    }
    cpu_cache_ran_empty(caches, size_class);
    return cpu_cache_magazine(caches, size_class);
}

enum cache_spill cpu_cache_spill(struct cpu_caches *caches, uint32_t size_class, void *block, void **blocks,
                                 size_t *count) {
    if (cpu_cache_is_newest(caches, size_class, block)) {
        return CACHE_HAD;
    }
    if (cpu_cache_open(caches, size_class) && caches->classes->of[size_class].size < CACHE_LINE_BYTES) {
        return CACHE_OPENED;
    }
    if (cpu_cache_push_some(caches, size_class, &block, 1) == 1 ||
        (cpu_cache_ran_full(caches, size_class) && cpu_cache_push_some(caches, size_class, &block, 1) == 1)) {
        return CACHE_KEEPS;
    }
    *count = cpu_cache_pop_some(caches, size_class, blocks, cpu_cache_magazine(caches, size_class));
    calm_assert(*count < MAX_MAGAZINE_BLOCKS, size_class, *count);
    blocks[(*count)++] = block;
    return CACHE_SPILLS;
}

/*
 * Takes room from each stack that did not run empty since the last check, but
 * leaves room for the blocks in it. A sequence that has just read the old end
 * may still push a block beyond the new one. The caller holds the cache's lock.
 */
static void cpu_cache_shrink(const struct cpu_caches *caches, struct cpu_cache_state *state) {
    for (uint32_t size_class = class_after(caches, state, 0); size_class < caches->classes->count;
         size_class = class_after(caches, state, size_class)) {
        const struct size_class *of = &caches->classes->of[size_class];
        struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
        void **start = start_of(caches, state, size_class);
        size_t room = words_between(start, stack_end(stack));
        size_t held = words_between(start, stack_top(stack));
        size_t wanted = size_max(size_max(room / 2, of->max_cached), held);
        if (turns_get(&state->turns[size_class].empty) == 0 && room > wanted) {
            stack_set_end(stack, start + wanted);
            calm_assert(state->grown_bytes >= (room - wanted) * of->size, size_class, state->grown_bytes,
                        room, wanted);
            state->grown_bytes -= (room - wanted) * of->size;
        }
        turns_restart(&state->turns[size_class]);
    }
}

/*
 * Returns a digest of the stacks' tops. If it is unchanged, the cache was not
 * used, or each push was followed by a pop. Both count as unused here. The
 * digest of an empty cache is 0. The digest of another cache is 0 with a
 * probability of 2^-64.
 */
static uint64_t digest(const struct cpu_caches *caches, const struct cpu_cache_state *state) {
    uint64_t digest = 0;
    for (uint32_t size_class = class_after(caches, state, 0); size_class < caches->classes->count;
         size_class = class_after(caches, state, size_class)) {
        const struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
        uint64_t held = words_between(start_of(caches, state, size_class), stack_top(stack));
        digest = digest * RANDOM_GOLDEN_RATIO + held;
    }
    return digest;
}

/* Empties the stacks of a closed cache that no sequence uses. */
static void empty_stacks(const struct cpu_caches *caches, const struct cpu_cache_state *state,
                         put_flushed *put, void *context) {
    for (uint32_t size_class = class_after(caches, state, 0); size_class < caches->classes->count;
         size_class = class_after(caches, state, size_class)) {
        struct stack *stack = stack_of(cpu_cache_words(caches, state), size_class);
        void **start = start_of(caches, state, size_class);
        for (void **top; (top = stack_top(stack)) > start;) {
            void *blocks[CACHE_FLUSH_BLOCKS];
            size_t count = size_min(words_between(start, top), CACHE_FLUSH_BLOCKS);
            memcpy(blocks, top - count, count * sizeof *blocks);
            stack_set_top(stack, top - count);
            calm_assert(count > 0 && count <= CACHE_FLUSH_BLOCKS && lock_is_mine(&state->lock), size_class,
                        count);
            put(context, blocks, count);
        }
    }
}

/* The cache is closed first, so that no sequence that begins later changes a
 * stack. Then the sequences under way are restarted. Blocks that threads free
 * meanwhile bypass the closed cache. */
void cpu_cache_flush(struct cpu_caches *caches, unsigned number, bool only_if_idle, put_flushed *put,
                     void *context) {
    calm_assert(number < caches->count && put != NULL, number, caches->count);
    struct cpu_cache_state *state = &caches->states[number];
    char *cache = cpu_cache_words(caches, state);
    if (!cpu_cache_is_open(state)) {
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
        if (sequences_are_over(caches)) {
            empty_stacks(caches, state, put, context);
            take_room(state);
            state->digest = 0;
            atomic_fetch_add_explicit(&caches->flushes, 1, memory_order_relaxed);
        } else {
            reopen_stacks(caches, state);
        }
    }
    lock_release(&state->lock);
}

bool cpu_caches_are_held(const struct cpu_caches *caches) {
    bool held = lock_is_mine(&caches->opening);
    for (unsigned number = 0; number < usable(caches); number++) {
        held |= lock_is_mine(&caches->states[number].lock);
    }
    return held;
}

void cpu_caches_before_fork(struct cpu_caches *caches, bool waits) {
    lock_acquire_for_fork(&caches->opening, waits);
    for (unsigned number = 0; number < usable(caches); number++) {
        if (cpu_cache_is_open(&caches->states[number])) {
            lock_acquire_for_fork(&caches->states[number].lock, waits);
        }
    }
}

void cpu_caches_after_fork(struct cpu_caches *caches, bool child) {
    for (unsigned number = usable(caches); number-- > 0;) {
        struct cpu_cache_state *state = &caches->states[number];
        lock_release_after_fork(&state->lock);
        /* A cache that is not open is closed already, and its memory may be
         * read-only. */
        if (child && lock_reset_in_child(&state->lock) && cpu_cache_is_open(state)) {
            close_stacks(caches, cpu_cache_words(caches, state));
            atomic_store_explicit(&state->open, false, memory_order_relaxed);
        }
    }
    lock_release_after_fork(&caches->opening);
    if (child) {
        lock_reset_in_child(&caches->opening);
    }
}
