/*
 * malloc(3) and its relatives, under the names that programs call, and those of
 * C23. Where the standard is silent, they do what glibc does, because programs
 * expect it.
 */
#include "api/allocator.h"
#include "calmalloc.h"
#include "os/libc.h"

#include <errno.h>
#include <malloc.h>
#include <stdlib.h>
#include <string.h>

/* In a build beside another malloc, for tests, only calm_malloc and its
 * relatives exist. */
#ifndef CALM_WITHOUT_MALLOC

#define EXPORT __attribute__((visibility("default")))

/* A function that starts at a cache line touches the fewest lines. */
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

/* This function calls realloc by its public name. So do other functions here
 * that few programs call. A memory debugger, such as memcheck, may have
 * replaced the functions that every program calls, and may not know the
 * others. */
EXPORT void *reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? out_of_memory() : realloc(block, bytes);
}

/* Takes any alignment, and rounds it up to a power of two, as glibc does. */
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

/* Behaves like the C library of the process, for which the program was
 * written. */
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
        errno = ENOMEM; /* glibc sets errno, too */
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

/* A wrong size must not corrupt the heap. The class is therefore found by the
 * address; no later instruction waits for this lookup. */
EXPORT void free_sized(void *block, size_t size) {
    (void)size;
    free(block);
}

EXPORT void free_aligned_sized(void *block, size_t alignment, size_t size) {
    (void)alignment, (void)size;
    free(block);
}

/* For old programs. glibc's headers no longer declare it. */
EXPORT void cfree(void *block) {
    free(block);
}

EXPORT int malloc_trim(size_t keep_bytes) {
    return allocator_trim(keep_bytes) > 0;
}

#if defined(__GLIBC__)

/* glibc's own names for the functions above. A few programs call these names,
 * and must not get blocks of glibc's heap. */
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

/* The parameters are those of glibc's malloc. The function accepts what glibc
 * accepts, and does nothing. */
EXPORT int mallopt(int parameter, int value) {
    (void)value;
    return parameter <= 1 && parameter >= -8;
}

#endif
