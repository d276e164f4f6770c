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
 * The region's words, all counted in 8 bytes from its start: for class c at 8 * c, four uint16_t: top, one
 * above the last block; bottom, where the stack begins; end, where it is full; and one unused. All zero is a
 * closed region.
 */
#ifndef CALM_CACHE_CPU_CACHE_H
#define CALM_CACHE_CPU_CACHE_H

#include "heap/size_class.h"
#include "os/cpus.h"
#include "os/lock.h"

#include <stdatomic.h>

#define CACHE_IDLE_LOOKS 10

#define REGION_SHIFT 15
#define REGION_BYTES ((size_t)1 << REGION_SHIFT)

enum cache_mode {
    CACHE_UNREADY, /* before the first allocation */
    CACHE_RSEQ,
    CACHE_LOCKED,
    CACHE_OFF, /* every block comes from the heap and goes there */
};

struct stack_words {
    _Atomic(uint16_t) top;
    _Atomic(uint16_t) bottom;
    _Atomic(uint16_t) end;
    uint16_t unused;
};

/* What is known of a region, apart from it. */
struct region_state {
    _Alignas(64) struct lock lock; /* of who opens, closes or drains it; in CACHE_LOCKED of everybody */
    _Atomic(bool) open;
    uint64_t seen;       /* a digest of its tops at the last look */
    unsigned idle_looks; /* in a row that found it the same */
};

struct cpu_caches {
    char *regions;
    ptrdiff_t rseq_area; /* 0 but in CACHE_RSEQ */
    ptrdiff_t cpu_number;
    _Atomic(int) mode; /* enum cache_mode; changes once, from CACHE_UNREADY */

    ptrdiff_t node;
    unsigned count;
    const struct size_classes *classes;
    struct region_state *states;
    uint16_t start_of[SIZE_CLASSES];
    _Atomic(uint64_t) drains;
};

/* The process's own: the fast path's instructions name it. */
extern struct cpu_caches calm_caches __attribute__((visibility("hidden")));

/* Sets everything but the mode and rseq_area. False if memory is short: then the mode must be CACHE_OFF. */
bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes, struct rseq_place place);

/* Bytes of blocks that all regions together can hold, and pages that those can touch. */
size_t cpu_caches_most_bytes(const struct cpu_caches *caches);
size_t cpu_caches_most_blocks(const struct cpu_caches *caches);

/* Up to count blocks off, or on, the stack of the CPU that runs the caller. Return how many. */
size_t cpu_cache_pop_some(uint32_t class, void **blocks, size_t count);
size_t cpu_cache_push_some(uint32_t class, void *const *blocks, size_t count);

/* Prepares the region of the CPU that runs the caller, if it has not been. */
void cpu_cache_open(struct cpu_caches *caches);

/*
 * Takes all blocks out of a region, whoever's CPU it is, and hands them to put, class by class; only_if_idle:
 * unless something changed in it during the last CACHE_IDLE_LOOKS calls. Returns the number of blocks. Any
 * thread; put is called with the region's lock held.
 */
size_t cpu_cache_drain(struct cpu_caches *caches, unsigned region, bool only_if_idle,
                       void (*put)(void *context, void *const *blocks, size_t count), void *context);

/* Blocks in all regions, and their bytes, about: it stops nobody. */
size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes);

/* The number of the node whose memory is near, if the kernel says. */
unsigned cpu_cache_node(void);

static inline bool cpu_cache_is_rseq(void) {
    return __builtin_expect(calm_caches.rseq_area != 0, 1);
}

/* For any mode but CACHE_RSEQ: NULL, and false, where there is no cache, or it is empty, or full. */
void *cpu_cache_pop_locked(uint32_t class);
bool cpu_cache_push_locked(uint32_t class, void *block);

#endif
