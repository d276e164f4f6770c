/*
 * Colored memory: blocks whose pages were chosen from a surplus by their place in a cache.
 *
 * A block is a mapping of its own, beside the heap. Thread-safe without a lock, so that fork needs nothing.
 */
#ifndef CALM_API_COLORED_H
#define CALM_API_COLORED_H

#include <stddef.h>

/* As calm_colored_alloc, on a machine whose files lie at root ("" for this one). Sets *error, and errno not
 * at all. */
void *colored_alloc(const char *root, size_t bytes, unsigned cache, int *error);

#endif
