/*
 * Colored memory: blocks made of pages that were chosen by their colors, from a surplus. Pages of one color
 * map to the same sets of a cache.
 *
 * A block is a mapping of its own, outside of all heaps. library.c exports these functions, and registers
 * the one for a fork. Thread-safe without a lock; errno is preserved.
 */
#ifndef CALM_COLORED_COLORED_H
#define CALM_COLORED_COLORED_H

#include "colored/calmcolored.h"

#include <stdbool.h>

/* As calm_colored_alloc, on the machine whose /proc and /sys are below root ("" for this one). Returns 0 and
 * the block, or an errno value. */
int colored_alloc(const char *root, size_t bytes, unsigned cache, void **block);

/* Unmaps a block. False if there is none at the address. */
bool colored_free(void *block);

/* As calm_colored_stats. False if there is no block at the address. */
bool colored_stats(const void *block, struct calm_colored *stats);

/* In the child of a fork: unmaps the blocks that other threads, which the child lacks, were making or
 * freeing.
 */
void colored_after_fork(void);

#endif
