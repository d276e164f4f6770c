/*
 * The fast paths of malloc and free, and the slow paths that they call.
 *
 * malloc(3), C++'s operators and calm_malloc are thin wrappers of these
 * functions. Any thread may call them, also before constructors and after
 * destructors. Only a failed allocation changes errno.
 */
#ifndef CALM_API_ALLOCATOR_H
#define CALM_API_ALLOCATOR_H

#include "api/fill.h"
#include "api/instance.h"
#include "cache/locked.h"
#include "cache/rseq.h"

/* Slow paths, and functions without an inline fast path. */
void *allocate_slow(size_t size);
void release_slow(void *block);
void *allocate_aligned(size_t alignment, size_t size);
void *allocate_zeroed(size_t count, size_t size);
void *reallocate(void *block, size_t size);
size_t usable_size(const void *block);

/* Purges all but keep_bytes of free memory. Returns the number of bytes
 * purged. */
size_t allocator_trim(size_t keep_bytes);

/* Sets errno to ENOMEM, and returns NULL. */
void *out_of_memory(void);

/* Returns the class of a size. Returns 0 for a size without a class, before the
 * start, and while the fast path is switched off. */
static inline uint32_t class_for(size_t size) {
    if (__builtin_expect(size <= SIZE_TABLE_BYTES, 1)) {
        return FAST_READ(calm_classes.small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM]);
    }
    return size <= FAST_READ(calm_classes.max_size) ? size_class_above_128(size) : 0;
}

/* Returns a class whose blocks have the alignment, a power of two. Returns 0
 * also if only a search finds such a class. Up to 1 KiB, the class that serves
 * a multiple of the alignment has a size that is also a multiple of it. Blocks
 * lie at multiples of their size. */
static inline uint32_t aligned_class_for(size_t alignment, size_t size) {
    if (alignment <= SIZE_QUANTUM) {
        return class_for(size);
    }
    bool small = size <= SIZE_TABLE_BYTES && alignment <= SIZE_TABLE_BYTES;
    return small ? class_for((size + (size == 0) + alignment - 1) & -alignment) : 0;
}

/* Pops a block of a class from the cache of this CPU. Returns false if the
 * cache has none, or if a thread needs the cache's lock. */
static inline __attribute__((always_inline)) bool pop_cached(const struct cpu_caches *caches,
                                                             uint32_t size_class, void **block) {
    if (cpu_cache_is_rseq(caches)) {
        return fill_if(rseq_pop(caches, size_class, block), block, size_class);
    }
    return fill_if(cpu_cache_is_single_threaded(caches) && unlocked_pop(caches, size_class, block), block,
                   size_class);
}

static inline __attribute__((always_inline)) bool push_cached(const struct cpu_caches *caches,
                                                              uint32_t size_class, void *block) {
    fill_freed(block, size_class);
    if (cpu_cache_is_rseq(caches)) {
        return rseq_push(caches, size_class, block);
    }
    return cpu_cache_is_single_threaded(caches) && unlocked_push(caches, size_class, block);
}

/* This is malloc(3): a table gives the size's class, and a pop takes a block.
 * Sizes that are too large have class 0. Before the start, all sizes have class
 * 0. The stack of class 0 is always empty. */
static inline __attribute__((always_inline)) void *allocate(size_t size) {
    void *block;
    return __builtin_expect(pop_cached(&calm_caches, class_for(size), &block), 1) ? block
                                                                                  : allocate_slow(size);
}

/* Finds the class of the page that a block lies in; the page of a large block
 * has class 0. Returns false for unaligned pointers, and for pointers outside
 * the first segment, including NULL. */
static inline __attribute__((always_inline)) bool find_class(const void *block, uint32_t *size_class) {
    const struct page_map *map = &calm_arenas.map;
#if defined(__aarch64__)
    __asm__("" : "+r"(map)); /* or the compiler does not load words in pairs */
#endif
    uintptr_t offset = (uintptr_t)block - map->base;
    /* The rotation moves the low bits of an unaligned pointer to the top. The
     * number is then far beyond the end. */
    uintptr_t quantum = offset >> SPACE_QUANTUM_SHIFT | offset << (64 - SPACE_QUANTUM_SHIFT);
    if (__builtin_expect(quantum >= map->quanta, 0)) {
        return false;
    }
#if defined(__aarch64__)
    *size_class = map->first_classes[offset >> map->page_shift];
#else /* `offset` would have to be copied */
    *size_class = map->first_classes[quantum >> (SPACE_PAGE_SHIFT(map) - SPACE_QUANTUM_SHIFT)];
#endif
    return true;
}

/* Pushes a block onto the stack of its page's class in the CPU cache. The stack
 * of class 0 is always full. */
static inline __attribute__((always_inline)) bool release_cached(const struct cpu_caches *caches,
                                                                 void *block) {
    uint32_t size_class;
    return __builtin_expect(find_class(block, &size_class) && push_cached(caches, size_class, block), 1);
}

/* This is free(3). */
static inline __attribute__((always_inline)) void release(void *block) {
    if (!release_cached(&calm_caches, block)) {
        release_slow(block);
    }
}

#endif
