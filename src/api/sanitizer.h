/*
 * A program that was built with a sanitizer of gcc's or clang's brings an allocator of its own, which that
 * sanitizer needs: where it is there, each call is passed on to it, and none of this allocator's starts.
 */
#ifndef CALM_API_SANITIZER_H
#define CALM_API_SANITIZER_H

#include <stdbool.h>
#include <stddef.h>

/* What the sanitizers call their malloc(3) and its kin, all of them or none. */
extern void *__interceptor_malloc(size_t size) __attribute__((weak));
extern void *__interceptor_calloc(size_t count, size_t size) __attribute__((weak));
extern void *__interceptor_realloc(void *block, size_t size) __attribute__((weak));
extern void *__interceptor_memalign(size_t alignment, size_t size) __attribute__((weak));
extern void __interceptor_free(void *block) __attribute__((weak));
extern size_t __interceptor_malloc_usable_size(void *block) __attribute__((weak));

static inline bool sanitizer_is_there(void) {
#ifdef CALM_WITHOUT_MALLOC
    return false; /* beside another malloc, which may be a sanitizer's: this is what it is to watch */
#else
    return __interceptor_malloc_usable_size != NULL; /* which RealtimeSanitizer has not, nor a malloc */
#endif
}

#endif
