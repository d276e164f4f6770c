/*
 * What CPU caches are made of, and what a lone thread does with them.
 *
 * A cache consists of 8-byte words: for each class a top, the index of the word that the next block goes to;
 * for each class a stack_bounds; then the stacks, close to each other; then room for those that grow. What
 * each call writes is apart from what it only reads, and is a whole word, which processors forward from a
 * store to the next load faster than a part of one. A closed cache looks empty to pop and full to push; all
 * zero is one.
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

#define CPU_CACHE_SHIFT 17
#define CPU_CACHE_BYTES ((size_t)1 << CPU_CACHE_SHIFT)
#define CLOSED_CACHES   3

enum cache_mode {
    CACHE_UNREADY, /* before the first allocation */
    CACHE_RSEQ,
    CACHE_LOCKED,
    CACHE_OFF, /* every block comes from the heap and returns to it */
};

/* Both are indices of words in the cache. */
struct stack_bounds {
    _Atomic(uint32_t) not_bottom; /* ~bottom: 0 means a bottom above any top, hence nothing to pop */
    _Atomic(uint32_t) end;
};

#define STACK_BOUNDS_AT ((size_t)8 * SIZE_CLASSES)

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
    return __builtin_expect(caches->in_rseq_mode, 1);
}

/* The acquire: a lone thread sees what a helper that is gone left in its cache. */
static inline bool cpu_cache_is_alone(const struct cpu_caches *caches) {
    return *atomic_load_explicit(&caches->alone, memory_order_acquire) != 0;
}

static inline _Atomic(uint64_t) *stack_top_of(char *cache, uint32_t class) {
    return (_Atomic(uint64_t) *)(void *)cache + class;
}

static inline struct stack_bounds *stack_bounds_of(char *cache, uint32_t class) {
    return (struct stack_bounds *)(void *)(cache + STACK_BOUNDS_AT) + class;
}

/*
 * One block, for a thread that is alone, by plain accesses to the words of the first cache. On x86-64 in
 * assembly, as compilers take three instructions more.
 */
static inline __attribute__((always_inline)) bool alone_pop(const struct cpu_caches *caches, uint32_t class,
                                                            void **popped) {
#if defined(__x86_64__)
    uint64_t top;
    void *block;
    bool found;
    __asm__ volatile("movq (%[cache],%[class],8), %[top]\n\t"
                     "movl %c[bounds](%[cache],%[class],8), %k[block]\n\t"
                     "addl %k[top], %k[block]\n\t"
                     "jnc 6f\n\t"
                     "decq %[top]\n\t"
                     "movq %[top], (%[cache],%[class],8)\n\t"
                     "movq (%[cache],%[top],8), %[block]\n"
                     "6:\n\t"
                     : [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : [cache] "r"(caches->base), [class] "r"((uint64_t) class), [bounds] "i"(STACK_BOUNDS_AT)
                     : "memory");
    *popped = block;
    return found;
#else
    _Atomic(uint64_t) *stack = stack_top_of(caches->base, class);
    const struct stack_bounds *bounds = stack_bounds_of(caches->base, class);
    uint64_t top = atomic_load_explicit(stack, memory_order_relaxed);
    uint32_t not_bottom = atomic_load_explicit(&bounds->not_bottom, memory_order_relaxed);
    if (__builtin_expect(top <= (uint32_t)~not_bottom, 0)) {
        return false;
    }
    *popped = ((void **)(void *)caches->base)[top - 1];
    atomic_store_explicit(stack, top - 1, memory_order_relaxed);
    return true;
#endif
}

static inline __attribute__((always_inline)) bool alone_push(const struct cpu_caches *caches, uint32_t class,
                                                             void *block) {
#if defined(__x86_64__)
    uint64_t top;
    bool room;
    __asm__ volatile("movq (%[cache],%[class],8), %[top]\n\t"
                     "cmpl %c[bounds]+4(%[cache],%[class],8), %k[top]\n\t"
                     "jae 6f\n\t"
                     "cmpq %[block], -8(%[cache],%[top],8)\n\t"
                     "je 6f\n\t"
                     "movq %[block], (%[cache],%[top],8)\n\t"
                     "subq $-1, %[top]\n\t"
                     "movq %[top], (%[cache],%[class],8)\n"
                     "6:\n\t"
                     : [top] "=&r"(top), "=@ccb"(room)
                     : [cache] "r"(caches->base), [class] "r"((uint64_t) class),
                       [bounds] "i"(STACK_BOUNDS_AT), [block] "r"(block)
                     : "memory");
    return room;
#else
    _Atomic(uint64_t) *stack = stack_top_of(caches->base, class);
    const struct stack_bounds *bounds = stack_bounds_of(caches->base, class);
    uint64_t top = atomic_load_explicit(stack, memory_order_relaxed);
    if (__builtin_expect(top >= atomic_load_explicit(&bounds->end, memory_order_relaxed), 0)) {
        return false;
    }
    ((void **)(void *)caches->base)[top] = block;
    atomic_store_explicit(stack, top + 1, memory_order_relaxed);
    return true;
#endif
}

#endif
