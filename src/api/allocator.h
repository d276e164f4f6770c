/*
 * The process's allocator: one governor with its heap, the size classes, the CPUs' caches; and the fast
 * paths.
 *
 * malloc(3), C++'s operators and calm_malloc are all thin names for what is here. Everything is thread-safe,
 * and may be called before constructors and after destructors. Nothing but a failed allocation touches errno.
 */
#ifndef CALM_API_ALLOCATOR_H
#define CALM_API_ALLOCATOR_H

#include "cache/cpu_cache.h"
#include "cache/rseq.h"
#include "governor/governor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a heap can reach; of it only the first segment is reserved at once. */
#define ALLOCATOR_SPACE_BYTES ((size_t)1 << 40)

/* Hidden: reached by one instruction, without a table. */
extern struct size_classes calm_classes __attribute__((visibility("hidden")));
extern struct governor calm_governor __attribute__((visibility("hidden")));

/* The way that the fast paths leave, and everything that has none. */
void *allocate_slow(size_t size);
void release_slow(void *block);
void *allocate_aligned(size_t alignment, size_t size);
void *allocate_zeroed(size_t count, size_t size);
void *reallocate(void *block, size_t size);
size_t usable_size(const void *block);

/* Before the first use; any number of times. False if there is no memory at all. */
bool allocator_ready(void);

/*
 * Whether malloc's fast path finds the size classes: with false all sizes look too large for it, and each
 * call comes to allocate_slow, where all classes are known. At any time, as a thread that reads the old
 * or the new of any entry does what is right; free is not concerned.
 */
void allocator_use_fast_path(bool use);

/* Sets errno; returns NULL. */
void *out_of_memory(void);

/* What allocator_use_fast_path may be writing. Compilers take an instruction more for an atomic read of so
 * little, which on these processors is what any aligned read is: only a watcher of races needs to be told. */
#if defined(__SANITIZE_THREAD__)
#define FAST_READ(word) __atomic_load_n(&(word), __ATOMIC_RELAXED)
#else
#define FAST_READ(word) (word)
#endif

/* The class of a size that has one; 0 for none, before the allocator is ready, and while the fast path is not
 * to be used. */
static inline uint32_t class_for(size_t size) {
    if (__builtin_expect(size <= SIZE_TABLE_BYTES, 1)) {
        return FAST_READ(calm_classes.small[(size + SIZE_QUANTUM - 1) / SIZE_QUANTUM]);
    }
    return size <= FAST_READ(calm_classes.size_most) ? size_class_above_128(size) : 0;
}

/*
 * malloc: the size's class, by a table, and a pop. Class 0 is that of what is too large, and of everything
 * before the first call: its stack is always empty.
 */
static inline __attribute__((always_inline)) void *allocate(size_t size) {
    uint32_t class = class_for(size);
    void *block;
    if (cpu_cache_is_rseq()) {
        if (__builtin_expect(rseq_pop(class, &block), 1)) {
            return block;
        }
    } else if (cpu_cache_is_alone()) {
        if (__builtin_expect(region_pop(calm_caches.regions, class, &block), 1)) {
            return block;
        }
    }
    return allocate_slow(size);
}

/*
 * free: the page's class, by arithmetic, and a push. The page of a large block is of class 0, whose stack is
 * always full; what is outside the first segment, NULL among it, is sorted out elsewhere.
 */
static inline __attribute__((always_inline)) void release(void *block) {
    const struct space *space = &calm_governor.heap.space;
    uintptr_t offset = (uintptr_t)block - space->base;
    /* A rotation: what is not aligned is far beyond the end. */
    uintptr_t quantum = offset >> SPACE_QUANTUM_SHIFT | offset << (64 - SPACE_QUANTUM_SHIFT);
    if (__builtin_expect(quantum < space->quanta, 1)) {
        uint32_t class = space->first_classes[quantum >> (SPACE_PAGE_SHIFT(space) - SPACE_QUANTUM_SHIFT)];
        if (cpu_cache_is_rseq()) {
            if (__builtin_expect(rseq_push(class, block), 1)) {
                return;
            }
        } else if (cpu_cache_is_alone()) {
            if (__builtin_expect(region_push(calm_caches.regions, class, block), 1)) {
                return;
            }
        }
    }
    release_slow(block);
}

#endif
