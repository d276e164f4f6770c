/* With USE_CALM_NAMES the program calls calm_malloc and so on, and leaves malloc to the allocator that
 * defines it. */
#ifndef CALM_TESTS_NAMES_H
#define CALM_TESTS_NAMES_H

#include <malloc.h>
#include <stdlib.h>

#ifdef USE_CALM_NAMES
#define malloc             calm_malloc
#define free               calm_free
#define calloc             calm_calloc
#define realloc            calm_realloc
#define reallocarray       calm_reallocarray
#define aligned_alloc      calm_aligned_alloc
#define posix_memalign     calm_posix_memalign
#define malloc_usable_size calm_malloc_usable_size
#endif

/* Of C23; few C libraries have them yet. */
#ifdef USE_CALM_NAMES
#define free_sized         calm_free_sized
#define free_aligned_sized calm_free_aligned_sized
#define HAS_SIZED_FREES    1
#else
extern void free_sized(void *block, size_t size);
extern void free_aligned_sized(void *block, size_t alignment, size_t size);
#ifdef LINKED
#define HAS_SIZED_FREES 1
#else
#pragma weak free_sized
#pragma weak free_aligned_sized
#define HAS_SIZED_FREES (free_sized != NULL && free_aligned_sized != NULL)
#endif
#endif

#endif
