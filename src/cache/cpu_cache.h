/*
 * Per-CPU caches of free blocks: what malloc and free do in nearly every call.
 *
 * Each (virtual) CPU has a region: for each size class a stack of pointers, bounded for good. A thread pops
 * and pushes on the CPU it happens to run on, in a restartable sequence: a few plain instructions, the last
 * of which commits, that the kernel restarts if the thread is preempted, migrated or interrupted by a signal
 * in between. So there is no lock, no atomic operation and no thread-local storage; memory held by caches is
 * bounded by CPUs, however many threads come and go; and an idle thread holds nothing.
 *
 * Where restartable sequences are missing (an old kernel or C library, valgrind, an emulator, a sanitizer) a
 * region has a lock, and a thread takes the region that its thread pointer hashes to.
 *
 * Whoever changes a region from elsewhere closes it first: it then looks empty to pop and full to push, and
 * once rseq_restart_all returns nobody is in it. Blocks in a region are not free to the heap.
 *
 * The region's words, all of 8 bytes: for each class a top, which says how many words from the region's start
 * on the next block goes; then for each class a stack_bounds: where the stack begins, and where it is full.
 * What each call writes lies apart from what it only reads, and is a whole word, which processors hand from a
 * store to the next load faster than a part of one. All zero is a closed region.
 */
#ifndef CALM_CACHE_CPU_CACHE_H
#define CALM_CACHE_CPU_CACHE_H

#include "heap/size_class.h"
#include "os/cpus.h"
#include "os/lock.h"

#include <stdatomic.h>

#define CACHE_IDLE_LOOKS 10
/* So often between two looks a cache runs full, and as often empty, before it grows. */
#define CACHE_TURNS 4
/* By which all stacks of a region together may grow. */
#define GROWN_BYTES_MOST ((size_t)2 << 20)

#define REGION_SHIFT 17
#define REGION_BYTES ((size_t)1 << REGION_SHIFT)

enum cache_mode {
    CACHE_UNREADY, /* before the first allocation */
    CACHE_RSEQ,
    CACHE_LOCKED,
    CACHE_OFF, /* every block comes from the heap and goes there */
};

/* Both counted in words from the region's start. */
struct stack_bounds {
    _Atomic(uint32_t) not_bottom; /* ~bottom: of zeros, beneath which there is nothing, whatever the top */
    _Atomic(uint32_t) end;
};

#define STACK_BOUNDS_AT ((size_t)8 * SIZE_CLASSES)

/* What is known of a region, apart from it. */
struct region_state {
    _Alignas(64) struct lock lock; /* of who opens, closes or drains it; in CACHE_LOCKED of everybody */
    _Atomic(bool) open;
    uint64_t seen;       /* a digest of its tops at the last look */
    unsigned idle_looks; /* in a row that found it the same */
    /* Since the last look, about: threads that count at once may lose a count. */
    _Atomic(uint8_t) ran_full[SIZE_CLASSES];
    _Atomic(uint8_t) ran_empty[SIZE_CLASSES];
    size_t grown_bytes;
};

struct cpu_caches {
    char *regions;
    ptrdiff_t rseq_area;
    ptrdiff_t cpu_number;
    bool in_rseq_mode;
    /* In CACHE_LOCKED: where the C library tells (glibc 2.32) that the process surely has but one thread,
     * which then needs no lock. Elsewhere, and while there is a helper, it tells of nothing. */
    _Atomic(const char *) alone;
    const char *alone_without_helper;
    _Atomic(int) mode; /* enum cache_mode; changes once, from CACHE_UNREADY */

    ptrdiff_t node;
    unsigned count; /* of regions; beside them there is one that is never opened, with this number */
    bool one_each;  /* a region for each CPU there could be: else CACHE_RSEQ is out of the question */
    const struct size_classes *classes;
    struct region_state *states;
    uint16_t start_of[SIZE_CLASSES];
    _Atomic(uint64_t) drains;
};

/* The process's own: the fast path's instructions name it. */
extern struct cpu_caches calm_caches __attribute__((visibility("hidden")));

/* For a child of vfork: where its CPU's number is, from the thread pointer on (0 except in CACHE_RSEQ), and
 * what is to be added to it. The instructions of vfork name it. */
struct vfork_number {
    ptrdiff_t place;
    uint32_t count;
};
extern struct vfork_number calm_vfork __attribute__((visibility("hidden")));

/* Whether the caller is a child of vfork, and its memory its parent's, as far as calm_vfork tells. */
bool cpu_cache_is_vforked(void);

/* Prepares everything but the mode. False if memory is short: then the mode must be CACHE_OFF. */
bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes, struct rseq_place place);

/* Once, when all that the fast paths need is there. may_be_alone: whether there will be no server, which the
 * C library does not know of, and a lone thread of the program so may go without a lock. */
void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode, bool may_be_alone);

/*
 * Before a helper starts, which may drain caches and which the C library does not know of either: from now on
 * a lone thread takes the locks, too. Called outside of all operations on caches, hence a lone thread is not
 * within one. cpu_caches_without_helper: by the helper as its last act, since a lone thread that is within an
 * operation holds the lock until that ends; or by the only thread of a forked child.
 */
void cpu_caches_with_helper(struct cpu_caches *caches);
void cpu_caches_without_helper(struct cpu_caches *caches);

/* Bytes of blocks that all regions in use can hold together, and how many blocks. */
size_t cpu_caches_most_bytes(const struct cpu_caches *caches);
size_t cpu_caches_most_blocks(const struct cpu_caches *caches);

/* Up to count blocks off, or on, the stack of the CPU that runs the caller. Return how many. */
size_t cpu_cache_pop_some(uint32_t class, void **blocks, size_t count);
size_t cpu_cache_push_some(uint32_t class, void *const *blocks, size_t count);

/*
 * Whether a block that its owner frees is the newest on the stack of the CPU that runs the caller: then it
 * was freed before.
 */
bool cpu_cache_is_newest(uint32_t class, const void *block);

/* Gives room to a class's stack on the CPU that runs the caller. True if it had none. */
bool cpu_cache_open(struct cpu_caches *caches, uint32_t class);

/*
 * The cache of the CPU that runs the caller had no block, or no room: notes it. True if there is room now,
 * for one that runs both ways over and over grows, and shrinks again when a look finds that it did not.
 */
void cpu_cache_ran_empty(uint32_t class);
bool cpu_cache_ran_full(uint32_t class);

/* Blocks to move at once to or from the stack of the CPU that runs the caller: the class's batch, or of
 * medium blocks half of what there is room for. */
size_t cpu_cache_magazine(uint32_t class);

/*
 * Takes all blocks out of a region, whoever's CPU it is, and hands them to put, class by class; only_if_idle:
 * unless something changed in it during the last CACHE_IDLE_LOOKS calls. Returns the number of blocks. Any
 * thread; put is called with the region's lock held.
 */
size_t cpu_cache_drain(struct cpu_caches *caches, unsigned region, bool only_if_idle,
                       void (*put)(void *context, void *const *blocks, size_t count), void *context);

/* Blocks in all regions, and their bytes, about: it stops nobody. */
size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes);

/*
 * Around fork: holds the locks of all open regions in between, unless it may not wait for one. A region whose
 * lock another thread held is empty in the child, and opened anew: the other thread was about to open it, or
 * to drain it.
 */
void cpu_caches_before_fork(struct cpu_caches *caches, bool waits);
void cpu_caches_after_fork(struct cpu_caches *caches, bool child);

/* Whether the caller holds a region's lock. */
bool cpu_caches_are_held(const struct cpu_caches *caches);

/* The number of the region that is the caller's just now. */
unsigned cpu_cache_number(void);

/* The number of the node whose memory is near, if the kernel says. */
unsigned cpu_cache_node(void);

static inline bool cpu_cache_is_rseq(void) {
    return __builtin_expect(calm_caches.in_rseq_mode, 1);
}

/* The acquire: a lone thread sees what a helper that is gone left in its cache. */
static inline bool cpu_cache_is_alone(void) {
    return *atomic_load_explicit(&calm_caches.alone, memory_order_acquire) != 0;
}

static inline _Atomic(uint64_t) *stack_top_of(char *region, uint32_t class) {
    return (_Atomic(uint64_t) *)(void *)region + class;
}

static inline struct stack_bounds *stack_bounds_of(char *region, uint32_t class) {
    return (struct stack_bounds *)(void *)(region + STACK_BOUNDS_AT) + class;
}

/*
 * One block, of a thread that is alone: plain accesses to the words, for there is nobody else. On x86-64
 * spelled out, as compilers take three instructions more.
 */
static inline __attribute__((always_inline)) bool region_pop(const char *region, uint32_t class,
                                                             void **popped) {
#if defined(__x86_64__)
    uint64_t top;
    void *block;
    bool found;
    __asm__ volatile("movq (%[region],%[class],8), %[top]\n\t"
                     "movl %c[bounds](%[region],%[class],8), %k[block]\n\t"
                     "addl %k[top], %k[block]\n\t"
                     "jnc 6f\n\t"
                     "decq %[top]\n\t"
                     "movq %[top], (%[region],%[class],8)\n\t"
                     "movq (%[region],%[top],8), %[block]\n"
                     "6:\n\t"
                     : [top] "=&r"(top), [block] "=&r"(block), "=@ccc"(found)
                     : [region] "r"(region), [class] "r"((uint64_t) class), [bounds] "i"(STACK_BOUNDS_AT)
                     : "memory");
    *popped = block;
    return found;
#else
    _Atomic(uint64_t) *stack = stack_top_of((char *)(uintptr_t)region, class);
    const struct stack_bounds *bounds = stack_bounds_of((char *)(uintptr_t)region, class);
    uint64_t top = atomic_load_explicit(stack, memory_order_relaxed);
    uint32_t not_bottom = atomic_load_explicit(&bounds->not_bottom, memory_order_relaxed);
    if (__builtin_expect(top <= (uint32_t)~not_bottom, 0)) {
        return false;
    }
    *popped = ((void **)(uintptr_t)region)[top - 1];
    atomic_store_explicit(stack, top - 1, memory_order_relaxed);
    return true;
#endif
}

static inline __attribute__((always_inline)) bool region_push(const char *region, uint32_t class,
                                                              void *block) {
#if defined(__x86_64__)
    uint64_t top;
    bool room;
    __asm__ volatile("movq (%[region],%[class],8), %[top]\n\t"
                     "cmpl %c[bounds]+4(%[region],%[class],8), %k[top]\n\t"
                     "jae 6f\n\t"
                     "cmpq %[block], -8(%[region],%[top],8)\n\t"
                     "je 6f\n\t"
                     "movq %[block], (%[region],%[top],8)\n\t"
                     "subq $-1, %[top]\n\t"
                     "movq %[top], (%[region],%[class],8)\n"
                     "6:\n\t"
                     : [top] "=&r"(top), "=@ccb"(room)
                     : [region] "r"(region), [class] "r"((uint64_t) class), [bounds] "i"(STACK_BOUNDS_AT),
                       [block] "r"(block)
                     : "memory");
    return room;
#else
    _Atomic(uint64_t) *stack = stack_top_of((char *)(uintptr_t)region, class);
    const struct stack_bounds *bounds = stack_bounds_of((char *)(uintptr_t)region, class);
    uint64_t top = atomic_load_explicit(stack, memory_order_relaxed);
    if (__builtin_expect(top >= atomic_load_explicit(&bounds->end, memory_order_relaxed), 0)) {
        return false;
    }
    ((void **)(uintptr_t)region)[top] = block;
    atomic_store_explicit(stack, top + 1, memory_order_relaxed);
    return true;
#endif
}

#endif
