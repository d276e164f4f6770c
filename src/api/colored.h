/*
 * Colored memory: blocks whose pages were chosen from a surplus by their place in a cache.
 *
 * A block is a mapping of its own, beside the heap. Thread-safe without a lock.
 */
#ifndef CALM_API_COLORED_H
#define CALM_API_COLORED_H

#include <stddef.h>

/* As calm_colored_alloc, on a machine whose files lie at root ("" for this one). Sets *error, and errno not
 * at all. */
void *colored_alloc(const char *root, size_t bytes, unsigned cache, int *error);

/* In the child: what other threads were about to make or free goes back, as they are not here to do it. */
void colored_after_fork(void);

#endif
