/*
 * The memory of the CPU caches and its accessors: the words of a cache, and the
 * state that is kept apart from them. Both modes, rseq.h and locked.h, use this
 * file.
 *
 * A cache begins with three arrays that have a word for each size class: the
 * tops, which are the addresses of the words that the next blocks go to; the
 * complements of the bottoms; and the ends. The stacks follow, in the order in
 * which they got room. The words that each call writes are apart from the words
 * that it only reads. A closed stack looks empty to a pop and full to a push. A
 * stack whose words are zeros is closed, and so is each stack without room.
 *
 * A malloc that follows a free loads two words that the free has just stored:
 * the top, and the pointer to the block. Processors forward a store to a later
 * load without delay, or even rename the word, if both addresses consist of a
 * register and a constant. With an index register, forwarding takes several
 * more cycles, which would be most of the time of both calls (docs/hot.md).
 * Therefore all words of a size class have one base, and a top is an address,
 * not an index.
 */
#ifndef CALM_CACHE_STACKS_H
#define CALM_CACHE_STACKS_H

#include "base/size_class.h"
#include "cache/growth.h"
#include "os/lock.h"
#include "os/rseq.h"
#include "os/thread.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* 1 if rseq.h has restartable sequences for this processor. */
#if !defined(CALM_WITHOUT_RSEQ)
#define HAS_SEQUENCES 1
#else
#define HAS_SEQUENCES 0
#endif

#define CPU_CACHE_SHIFT 17
#define CPU_CACHE_BYTES ((size_t)1 << CPU_CACHE_SHIFT)

/* Before the first cache, one for each number of no CPU: always closed. */
#define CLOSED_CACHES RSEQ_NUMBERS

enum cache_mode {
    CACHE_UNREADY, /* before the first allocation */
    CACHE_RSEQ,
    CACHE_LOCKED,
    CACHE_OFF, /* every block comes from the heap and returns to it */
};

/* Why the mode is CACHE_LOCKED; counters.def has the numbers, too. */
enum cache_lock_reason {
    LOCKS_NONE, /* the mode is another */
    LOCKS_WANTED,
    LOCKS_UNREGISTERED, /* no restartable sequences, for example under an emulator */
    LOCKS_MANY_CPUS,    /* not each CPU can have a cache */
    LOCKS_NO_FENCE,     /* the kernel has no rseq_restart_all, so that no thread could flush a cache */
    LOCKS_BROKEN,       /* rseq_is_broken */
};

/* Bytes from a class's top to its other two words. */
#define STACK_BOTTOM_AT ((size_t)8 * SIZE_CLASSES)
#define STACK_END_AT    ((size_t)16 * SIZE_CLASSES)

/* The words of a class in a cache, from its top on. No function accesses
 * `between` and `between_too`, which are words of other classes. */
struct stack {
    _Atomic(void **) top;
    void **between[SIZE_CLASSES - 1];
    _Atomic(uintptr_t) not_bottom; /* ~bottom; 0 if the stack is closed: its bottom is then above any top */
    void **between_too[SIZE_CLASSES - 1];
    _Atomic(void **) end;
};

/* The state of a cache, apart from its words. */
struct cpu_cache_state {
    /* A thread holds it while it gives a stack room, lets it grow, or flushes
     * the cache. In CACHE_LOCKED, each operation on the cache holds it, too.
     * While the cache is closed, no thread waits for it. */
    _Alignas(64) struct lock lock;
    _Atomic(bool) open;   /* stays true, except in a forked child */
    uint64_t digest;      /* of the tops, at the last check */
    unsigned idle_checks; /* consecutive checks that found the same digest */
    struct turns turns[SIZE_CLASSES];
    size_t grown_bytes;
    uint16_t next;                /* the number of the first word that no stack has */
    uint16_t start[SIZE_CLASSES]; /* of each stack's first word; 0: the stack has no room, and is closed */
    bool moved[SIZE_CLASSES];     /* the stack has moved to room in which it may grow */
};

struct cpu_caches {
    char *base; /* the words of the first cache; those of the others follow */
    struct rseq_offsets rseq;
    bool in_rseq_mode;
    /* In CACHE_LOCKED, points to the byte by which the C library (glibc 2.32)
     * says that the process has only one thread. That thread then needs no
     * lock. In other modes, and while a helper runs, points to a byte that is
     * always 0. */
    _Atomic(const char *) single;
    const char *single_without_helper;
    _Atomic(int) mode; /* enum cache_mode; changes once, from CACHE_UNREADY */

    struct cpu_caches *shared; /* see cpu_caches_share; or NULL */

    unsigned count;        /* of caches, without those that are always closed */
    bool one_per_cpu;      /* each possible CPU has a cache; otherwise CACHE_RSEQ must not be chosen */
    _Atomic(bool) limited; /* cpu_caches_limit has released the caches that have no CPU */
    const struct size_classes *classes;
    struct cpu_cache_state *states;
    struct lock opening; /* a thread holds it while it opens a cache */
    _Atomic(uint64_t) flushes;
    uint64_t lock_reason; /* enum cache_lock_reason */
};

/* The initial value of each instance. With it, the fast paths may use the
 * instance before cpu_caches_init. */
#define CPU_CACHES_UNREADY \
    { .single = &thread_not_single, .single_without_helper = &thread_not_single }

static inline bool cpu_cache_is_rseq(const struct cpu_caches *caches) {
    return HAS_SEQUENCES && __builtin_expect(caches->in_rseq_mode, 1);
}

/* Returns the words of a cache. */
static inline char *cpu_cache_words(const struct cpu_caches *caches, const struct cpu_cache_state *state) {
    return caches->base + ((size_t)(state - caches->states) << CPU_CACHE_SHIFT);
}

/* If it returns true, the caller also sees the rest of the state. */
static inline bool cpu_cache_is_open(const struct cpu_cache_state *state) {
    return atomic_load_explicit(&state->open, memory_order_acquire);
}

/* Returns the number of the first word of a class's stack, or 0 if it has no
 * room. Without the cache's lock, the stack may move meanwhile. */
static inline size_t cpu_cache_start(const struct cpu_cache_state *state, uint32_t size_class) {
    return __atomic_load_n(&state->start[size_class], __ATOMIC_RELAXED);
}

/* ---- the words of a stack ---- */

/* A thread writes these words under the cache's lock, or in a sequence on the
 * cache's own CPU. */

static inline struct stack *stack_of(char *cache, uint32_t size_class) {
    return (struct stack *)(void *)(cache + (size_t)8 * size_class);
}

static inline void **stack_top(const struct stack *stack) {
    return atomic_load_explicit(&stack->top, memory_order_relaxed);
}

static inline void stack_set_top(struct stack *stack, void **top) {
    atomic_store_explicit(&stack->top, top, memory_order_release);
}

/* The bottom of a closed stack is above any top. */
static inline void **stack_bottom(const struct stack *stack) {
    return (void **)~atomic_load_explicit(&stack->not_bottom, memory_order_relaxed);
}

static inline void stack_set_bottom(struct stack *stack, void **bottom) {
    atomic_store_explicit(&stack->not_bottom, ~(uintptr_t)bottom, memory_order_release);
}

static inline void **stack_end(const struct stack *stack) {
    return atomic_load_explicit(&stack->end, memory_order_relaxed);
}

static inline void stack_set_end(struct stack *stack, void **end) {
    atomic_store_explicit(&stack->end, end, memory_order_release);
}

static inline size_t words_between(void *const *low, void *const *high) {
    return low < high ? (size_t)(high - low) : 0;
}

/*
 * Returns whether a block that its owner frees is the newest of a stack. If so,
 * the block was freed before. Without a lock, the stack may change while the
 * function reads its words. The answer is right nevertheless. The block below a
 * top was there when the top was read, or was pushed later. A block that its
 * owner still has was never there.
 */
static inline bool stack_has_newest(const struct stack *stack, const void *block) {
    /* By the acquire, a thread that sees an end also sees a top. */
    if (atomic_load_explicit(&stack->end, memory_order_acquire) == NULL) {
        return false;
    }
    void *const volatile *top = stack_top(stack);
    return top[-1] == block;
}

#endif
