/*
 * malloc(3) and its kin, under the names that programs call, and C23's. What glibc does where the standard is
 * silent is what programs have come to expect.
 */
#include "api/allocator.h"
#include "calmalloc.h"
#include "os/libc.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

/* Otherwise built beside another malloc, for tests: only calm_malloc and its kin are there. */
#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

/* At the start of a cache line: the fewest lines to run through. */
EXPORT __attribute__((aligned(64))) void *malloc(size_t size) {
    return allocate(size);
}

EXPORT __attribute__((aligned(64))) void free(void *block) {
    release(block);
}

EXPORT void *calloc(size_t count, size_t size) {
    return allocate_zeroed(count, size);
}

EXPORT void *realloc(void *block, size_t size) {
    return reallocate(block, size);
}

/* This, and what else is called by fewer programs, by way of the names that everybody calls: a debugger of
 * memory, as memcheck, may have put its own in their place, and know no others. */
EXPORT void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? out_of_memory() : realloc(block, bytes);
}

/* As glibc does: the next power of two is meant. */
static void *allocate_rounded_up(size_t alignment, size_t size) {
    if (alignment > (size_t)PTRDIFF_MAX + 1) {
        errno = EINVAL;
        return NULL;
    }
    size_t power = SIZE_QUANTUM;
    while (power < alignment) {
        power *= 2;
    }
    return allocate_aligned(power, size);
}

/* As the C library at hand: programs were written for it. */
EXPORT void *aligned_alloc(size_t alignment, size_t size) {
    bool rounds_up = !is_power_of_two(alignment) && libc_takes_odd_alignment(alignment);
    return rounds_up ? allocate_rounded_up(alignment, size) : calm_aligned_alloc(alignment, size);
}

EXPORT void *memalign(size_t alignment, size_t size) {
#ifdef __GLIBC__
    return allocate_rounded_up(alignment, size);
#else
    return aligned_alloc(alignment, size);
#endif
}

EXPORT int posix_memalign(void **block, size_t alignment, size_t size) {
    int error = calm_posix_memalign(block, alignment, size);
    if (error == ENOMEM) {
        errno = ENOMEM; /* too, as under glibc */
    }
    return error;
}

EXPORT void *valloc(size_t size) {
    return allocate_aligned(vm_page_size(), size);
}

EXPORT void *pvalloc(size_t size) {
    size_t page = vm_page_size();
    return size > PTRDIFF_MAX ? out_of_memory() : memalign(page, (size + page - 1) & ~(page - 1));
}

EXPORT size_t malloc_usable_size(void *block) {
    return usable_size(block);
}

/* A wrong size must not corrupt: the class is found by the address, whose lookup no chain of calls waits for.
 */
EXPORT void free_sized(void *block, size_t size) {
    (void)size;
    free(block);
}

EXPORT void free_aligned_sized(void *block, size_t alignment, size_t size) {
    (void)alignment, (void)size;
    free(block);
}

/* Of old programs; glibc took it out of its headers. */
EXPORT void cfree(void *block) {
    free(block);
}

EXPORT int malloc_trim(size_t keep_bytes) {
    return allocator_trim(keep_bytes) > 0;
}

#if defined(__GLIBC__)

/* glibc's own names for what is above, which a few programs call: their blocks must not come from glibc's
 * heap. */
#define GLIBC_NAME(type, name, of, parameters, arguments)   \
    EXPORT type libc_##name parameters __asm__("__" #name); \
    EXPORT type libc_##name parameters {                    \
        return of arguments;                                \
    }

GLIBC_NAME(void *, libc_malloc, allocate, (size_t size), (size))
GLIBC_NAME(void *, libc_calloc, allocate_zeroed, (size_t count, size_t size), (count, size))
GLIBC_NAME(void *, libc_realloc, reallocate, (void *block, size_t size), (block, size))
GLIBC_NAME(void *, libc_reallocarray, reallocarray, (void *block, size_t count, size_t size),
           (block, count, size))
GLIBC_NAME(void *, libc_memalign, memalign, (size_t alignment, size_t size), (alignment, size))
GLIBC_NAME(void *, libc_valloc, valloc, (size_t size), (size))
GLIBC_NAME(void *, libc_pvalloc, pvalloc, (size_t size), (size))
GLIBC_NAME(int, posix_memalign, posix_memalign, (void **block, size_t alignment, size_t size),
           (block, alignment, size))
GLIBC_NAME(void, libc_free, release, (void *block), (block))

#endif

/* Its parameters are of another allocator: accepted where it would accept them, and without effect. */
EXPORT int mallopt(int parameter, int value) {
    (void)value;
    return parameter <= 1 && parameter >= -8;
}

#endif
