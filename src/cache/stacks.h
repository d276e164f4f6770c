/*
 * What CPU caches are made of, and what a lone thread does with them.
 *
 * A cache begins with three arrays of a word for each class: the tops, addresses of the words that the next
 * blocks go to; the complements of the bottoms; and the ends. Then come the stacks, close to each other; then
 * room for those that grow. What each call writes is apart from what it only reads. A closed cache looks
 * empty to pop and full to push; all zero is one.
 *
 * A malloc that follows a free loads what that has just stored: the top, and the block. Processors forward
 * such a store to the load at once, or even rename the word, where both addresses are a register and a
 * constant; with an index register it takes them several cycles more, and these are most of what the pair
 * takes (docs/hot.md). So a class's words have one base, and a top is an address, not an index.
 *
 * For rseq.h and cpu_cache.c, and for the fast paths of malloc and free.
 */
#ifndef CALM_CACHE_STACKS_H
#define CALM_CACHE_STACKS_H

#include "cache/growth.h"
#include "heap/size_class.h"
#include "os/lock.h"
#include "os/thread.h"

#include <stdatomic.h>
#include <stddef.h>

/* Whether rseq.h has restartable sequences for this processor. */
#if defined(__x86_64__) && !defined(CALM_WITHOUT_RSEQ)
#define HAS_SEQUENCES 1
#else
#define HAS_SEQUENCES 0
#endif

#define CPU_CACHE_SHIFT 17
#define CPU_CACHE_BYTES ((size_t)1 << CPU_CACHE_SHIFT)
#define CLOSED_CACHES   3

enum cache_mode {
    CACHE_UNREADY, /* before the first allocation */
    CACHE_RSEQ,
    CACHE_LOCKED,
    CACHE_OFF, /* every block comes from the heap and returns to it */
};

/* Bytes from a class's top to its other two words. */
#define STACK_BOTTOM_AT ((size_t)8 * SIZE_CLASSES)
#define STACK_END_AT    ((size_t)16 * SIZE_CLASSES)

/* A class's words in a cache, from its top on; each is read and written by itself. */
struct stack {
    _Atomic(void **) top;
    void **between[SIZE_CLASSES - 1];
    _Atomic(uintptr_t) not_bottom; /* ~bottom: 0 means a bottom above any top, hence nothing to pop */
    void **between_too[SIZE_CLASSES - 1];
    _Atomic(void **) end;
};

/* What is known of a cache, apart from its words. */
struct cpu_cache_state {
    /* Held to open, close or flush the cache, and by a stack that grows; in CACHE_LOCKED always. */
    _Alignas(64) struct lock lock;
    _Atomic(bool) open;
    uint64_t digest;      /* of its tops at the last check */
    unsigned idle_checks; /* in a row that found the same digest */
    struct turns turns[SIZE_CLASSES];
    size_t grown_bytes;
    bool moved[SIZE_CLASSES]; /* to where it may grow, until the cache is flushed */
};

struct cpu_caches {
    char *base; /* of the first cache's words; the others follow */
    struct rseq_offsets rseq;
    bool in_rseq_mode;
    /* In CACHE_LOCKED: where the C library says (glibc 2.32) that the process has but one thread, which then
     * needs no lock. Elsewhere, and while there is a helper, a byte that never says so. */
    _Atomic(const char *) alone;
    const char *alone_without_helper;
    _Atomic(int) mode; /* enum cache_mode; changes once, from CACHE_UNREADY */

    struct cpu_caches *shared; /* cpu_caches_share; or NULL */

    unsigned count;        /* of caches; CLOSED_CACHES more, with higher numbers, are never opened */
    bool one_per_cpu;      /* a cache for each possible CPU: without it CACHE_RSEQ must not be chosen */
    _Atomic(bool) limited; /* those without a CPU are gone: cpu_caches_limit */
    const struct size_classes *classes;
    struct cpu_cache_state *states;
    uint16_t start_of[SIZE_CLASSES];
    uint16_t grown_start_of[SIZE_CLASSES];
    _Atomic(uint64_t) flushes;
};

/* How each instance begins: the fast paths may use it before cpu_caches_init. */
#define CPU_CACHES_UNREADY \
    { .alone = &thread_not_alone, .alone_without_helper = &thread_not_alone }

static inline bool cpu_cache_is_rseq(const struct cpu_caches *caches) {
    return HAS_SEQUENCES && __builtin_expect(caches->in_rseq_mode, 1);
}

/* The acquire: a lone thread sees what a helper that is gone left in its cache. */
static inline bool cpu_cache_is_alone(const struct cpu_caches *caches) {
    return __builtin_expect(*atomic_load_explicit(&caches->alone, memory_order_acquire) != 0, 1);
}

static inline struct stack *stack_of(char *cache, uint32_t class) {
    return (struct stack *)(void *)(cache + (size_t)8 * class);
}

/* Keeps the compiler from addressing its words by an index. */
static inline __attribute__((always_inline)) struct stack *alone_stack(const struct cpu_caches *caches,
                                                                       uint32_t class) {
    struct stack *stack = stack_of(caches->base, class);
    __asm__("" : "+r"(stack));
    return stack;
}

/* One block, for a thread that is alone, by plain accesses to the words of the first cache. */
static inline __attribute__((always_inline)) bool alone_pop(const struct cpu_caches *caches, uint32_t class,
                                                            void **popped) {
    struct stack *stack = alone_stack(caches, class);
    void **top = atomic_load_explicit(&stack->top, memory_order_relaxed);
    uintptr_t not_bottom = atomic_load_explicit(&stack->not_bottom, memory_order_relaxed);
    uintptr_t above;
    if (__builtin_expect(!__builtin_add_overflow((uintptr_t)top, not_bottom, &above), 0)) {
        return false;
    }
    *popped = top[-1];
    atomic_store_explicit(&stack->top, top - 1, memory_order_relaxed);
    return true;
}

/* False also if the block is the newest: then it was freed before. */
static inline __attribute__((always_inline)) bool alone_push(const struct cpu_caches *caches, uint32_t class,
                                                             void *block) {
    struct stack *stack = alone_stack(caches, class);
    void **top = atomic_load_explicit(&stack->top, memory_order_relaxed);
    if (__builtin_expect(top >= atomic_load_explicit(&stack->end, memory_order_relaxed) || top[-1] == block,
                         0)) {
        return false;
    }
    *top = block;
    atomic_store_explicit(&stack->top, top + 1, memory_order_relaxed);
    return true;
}

#endif
