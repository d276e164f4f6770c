/* Where the dynamic linker finds malloc. In the shared library for glibc only: elsewhere these are NULL. */
#ifndef CALM_API_LOADER_H
#define CALM_API_LOADER_H

#include <stdbool.h>
#include <stddef.h>

#define SHARED_ONLY __attribute__((weak, visibility("hidden")))

/* Whether the malloc that other objects call is this library's: no object defines one that comes before it.
 * Calls nothing, and takes no lock. */
SHARED_ONLY bool loader_finds_own_malloc(void);

/* new and delete by whichever malloc, aligned_alloc and free the process has. NULL if there is no memory. */
SHARED_ONLY void *loader_pass_new(size_t alignment, size_t size);
SHARED_ONLY void loader_pass_delete(void *block);

#endif
