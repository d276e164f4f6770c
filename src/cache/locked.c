#include "cache/locked.h"

#include "base/assert.h"
#include "base/size.h"

#include <string.h>

/* Returns the words of the caller's cache, which no other thread changes before
 * locked_leave. While it is closed, they are those of a cache that always is:
 * a fork does not hold the lock of a closed cache. */
static char *locked_enter(const struct cpu_caches *caches, struct lock **lock) {
    struct cpu_cache_state *state = &caches->states[locked_number(caches)];
    *lock = NULL;
    if (!cpu_cache_is_open(state)) {
        return caches->base - CPU_CACHE_BYTES;
    }
    if (!cpu_cache_is_single_threaded(caches)) {
        *lock = &state->lock;
        lock_acquire(*lock);
    }
    return cpu_cache_words(caches, state);
}

static void locked_leave(struct lock *lock) {
    if (lock != NULL) {
        lock_release(lock);
    }
}

/* Acquires the lock of the caller's cache. Returns false in other modes, for the
 * only thread, and while the cache is closed. */
static inline __attribute__((always_inline)) bool enter_among_threads(const struct cpu_caches *caches,
                                                                      struct lock **lock, char **words) {
    /* By the acquire, the caller sees the rest of the instance, too. */
    if (atomic_load_explicit(&caches->mode, memory_order_acquire) != CACHE_LOCKED ||
        cpu_cache_is_single_threaded(caches)) {
        return false;
    }
    unsigned number = thread_slot(caches->count);
    struct cpu_cache_state *state = &caches->states[number];
    if (!cpu_cache_is_open(state)) {
        return false;
    }
    *lock = &state->lock;
    *words = caches->base + ((size_t)number << CPU_CACHE_SHIFT); /* cpu_cache_words divides */
    lock_acquire(*lock);
    return true;
}

bool locked_pop(const struct cpu_caches *caches, uint32_t size_class, void **popped) {
    struct lock *lock;
    char *words;
    if (!enter_among_threads(caches, &lock, &words)) {
        return false;
    }
    if (!stack_pop(stack_of(words, size_class), popped)) {
        lock_release(lock);
        return false;
    }
    lock_release(lock);
    return true; /* a constant needs no register over the call */
}

bool locked_push(const struct cpu_caches *caches, uint32_t size_class, void *block) {
    struct lock *lock;
    char *words;
    if (!enter_among_threads(caches, &lock, &words)) {
        return false;
    }
    bool fits = stack_push(stack_of(words, size_class), block);
    lock_release(lock);
    return fits;
}

size_t locked_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, size_t count) {
    struct lock *lock;
    struct stack *stack = stack_of(locked_enter(caches, &lock), size_class);
    void **top = stack_top(stack);
    size_t taken = size_min(words_between(stack_bottom(stack), top), count);
    calm_assert(taken <= count && taken <= MAX_GROWN_BLOCKS, taken, count);
    if (taken > 0) {
        memcpy(blocks, top - taken, taken * sizeof *blocks);
        stack_set_top(stack, top - taken);
    }
    locked_leave(lock);
    return taken;
}

size_t locked_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                        size_t count) {
    struct lock *lock;
    struct stack *stack = stack_of(locked_enter(caches, &lock), size_class);
    void **top = stack_top(stack);
    size_t given = size_min(words_between(top, stack_end(stack)), count);
    calm_assert(given <= count && given <= MAX_GROWN_BLOCKS, given, count);
    if (given > 0) {
        memcpy(top, blocks, given * sizeof *blocks);
        stack_set_top(stack, top + given);
    }
    locked_leave(lock);
    return given;
}

bool locked_has_newest(const struct cpu_caches *caches, uint32_t size_class, const void *block) {
    struct lock *lock;
    bool found = stack_has_newest(stack_of(locked_enter(caches, &lock), size_class), block);
    locked_leave(lock);
    return found;
}
