/*
 * The fast paths of malloc and free, and the slow paths that they leave for.
 *
 * malloc(3), C++'s operators and calm_malloc are thin names for these. Everything is thread-safe, and may be
 * called before constructors and after destructors. Only a failed allocation changes errno.
 */
#ifndef CALM_API_ALLOCATOR_H
#define CALM_API_ALLOCATOR_H

#include "api/fill.h"
#include "api/state.h"
#include "cache/rseq.h"

/* The slow paths, and what has no fast path. */
void *allocate_slow(size_t size);
void release_slow(void *block);
void *allocate_aligned(size_t alignment, size_t size);
void *allocate_zeroed(size_t count, size_t size);
void *reallocate(void *block, size_t size);
size_t usable_size(const void *block);

/* Purges all but keep_bytes of free memory; returns the bytes purged. */
size_t allocator_trim(size_t keep_bytes);

/* Sets errno; returns NULL. */
void *out_of_memory(void);

/* The slow paths of any instance: every block comes from, and goes back to, its caches and backend. A block
 * is not NULL. */
void *allocator_allocate(struct allocator *allocator, size_t size);
void allocator_release(struct allocator *allocator, void *block);

/* For words that allocator_use_fast_path may be writing. Compilers take an additional instruction for an
 * atomic read of a byte, which on these processors is what any aligned read is: only ThreadSanitizer needs
 * it. */
#if defined(__SANITIZE_THREAD__)
#define FAST_READ(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#else
#define FAST_READ(word) (word)
#endif

/* The class of a size; 0 for a size without one, before the start, and while the fast path is off. */
static inline uint32_t class_for(size_t size) {
    if (__builtin_expect(size <= SIZE_TABLE_BYTES, 1)) {
        return FAST_READ(calm_classes.small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM]);
    }
    return size <= FAST_READ(calm_classes.max_size) ? size_class_above_128(size) : 0;
}

/* The class whose blocks have an alignment, a power of two; 0 also if only a search finds it. Up to 1 KiB the
 * class of a multiple of the alignment is of such a size, too, and blocks lie at multiples of their size. */
static inline uint32_t aligned_class_for(size_t alignment, size_t size) {
    if (alignment <= SIZE_QUANTUM) {
        return class_for(size);
    }
    bool small = size <= SIZE_TABLE_BYTES && alignment <= SIZE_TABLE_BYTES;
    return small ? class_for((size + (size == 0) + alignment - 1) & -alignment) : 0;
}

/* A block of a class from the cache of this CPU. False if there is none, or if the cache needs its lock. */
static inline __attribute__((always_inline)) bool pop_cached(const struct cpu_caches *caches, uint32_t class,
                                                             void **block) {
    if (cpu_cache_is_rseq(caches)) {
        return fill_if(rseq_pop(caches, class, block), block, class);
    }
    return fill_if(cpu_cache_is_alone(caches) && alone_pop(caches, class, block), block, class);
}

static inline __attribute__((always_inline)) bool push_cached(const struct cpu_caches *caches, uint32_t class,
                                                              void *block) {
    fill_freed(block, class);
    if (cpu_cache_is_rseq(caches)) {
        return rseq_push(caches, class, block);
    }
    return cpu_cache_is_alone(caches) && alone_push(caches, class, block);
}

/*
 * malloc: the size's class, by a table, and a pop. Class 0 is that of sizes that are too large, and of all
 * sizes before the start: its stack is always empty.
 */
static inline __attribute__((always_inline)) void *allocate(size_t size) {
    void *block;
    return __builtin_expect(pop_cached(&calm_caches, class_for(size), &block), 1) ? block
                                                                                  : allocate_slow(size);
}

/*
 * The class of the page that a block lies in, 0 for that of a large one. False for pointers outside of the
 * first segment, NULL among them, and for unaligned ones.
 */
static inline __attribute__((always_inline)) bool find_class(const void *block, uint32_t *class) {
    const struct space *space = &calm_governor.heap.space;
    uintptr_t offset = (uintptr_t)block - space->base;
    /* A rotation: an unaligned pointer is far beyond the end. */
    uintptr_t quantum = offset >> SPACE_QUANTUM_SHIFT | offset << (64 - SPACE_QUANTUM_SHIFT);
    if (__builtin_expect(quantum >= space->quanta, 0)) {
        return false;
    }
    *class = space->first_classes[quantum >> (SPACE_PAGE_SHIFT(space) - SPACE_QUANTUM_SHIFT)];
    return true;
}

/* Puts a block into the cache: the page's class, by arithmetic, and a push. The stack of class 0 is always
 * full. */
static inline __attribute__((always_inline)) bool release_cached(const struct cpu_caches *caches,
                                                                 void *block) {
    uint32_t class;
    return __builtin_expect(find_class(block, &class) && push_cached(caches, class, block), 1);
}

/* free. */
static inline __attribute__((always_inline)) void release(void *block) {
    if (!release_cached(&calm_caches, block)) {
        release_slow(block);
    }
}

#endif
