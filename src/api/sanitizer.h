/*
 * Sanitizers of gcc and clang. A program that is built with one brings an
 * allocator that the sanitizer needs. This library then passes each call on to
 * it, and does not start its own allocator.
 */
#ifndef CALM_API_SANITIZER_H
#define CALM_API_SANITIZER_H

#include <stdbool.h>
#include <stddef.h>

/* The sanitizers' names for malloc(3) and its relatives. A sanitizer has all of
 * them or none. */
extern void *__interceptor_malloc(size_t size) __attribute__((weak));
extern void *__interceptor_calloc(size_t count, size_t size) __attribute__((weak));
extern void *__interceptor_realloc(void *block, size_t size) __attribute__((weak));
extern void *__interceptor_memalign(size_t alignment, size_t size) __attribute__((weak));
extern void __interceptor_free(void *block) __attribute__((weak));
extern size_t __interceptor_malloc_usable_size(void *block) __attribute__((weak));

static inline bool sanitizer_is_there(void) {
#ifdef CALM_WITHOUT_MALLOC
    return false; /* the other malloc may be a sanitizer's, which watches this allocator in tests */
#else
    return __interceptor_malloc_usable_size != NULL; /* RealtimeSanitizer has neither this nor a malloc */
#endif
}

#endif
