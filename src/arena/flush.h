/* Flushing moves blocks from the CPU caches and the depots back to the heap,
 * and purges what then exceeds the limit. */
#ifndef CALM_ARENA_FLUSH_H
#define CALM_ARENA_FLUSH_H

#include "arena/state.h"

/* Flushes the blocks in depots that no thread wanted during the epoch, and the
 * CPU caches that were idle for several epochs. If `all` is true, flushes all
 * blocks in both. The caller holds the purger's lock. */
void flush_caches(struct arenas *arenas, bool all);

/* Returns the number of blocks in the caches and depots, and stores their
 * bytes. Both are approximate. */
size_t arena_cached(const struct arenas *arenas, size_t *bytes);

/* Returns the upper bound on the bytes of pages that these blocks keep in use.
 * It is a constant. In the worst case each block that a cache or depot may hold
 * is alone on its pages. */
size_t arena_max_cached(const struct arenas *arenas);

/* Purges if free memory exceeds the limit, or waits for the thread that is
 * purging. Any thread may call it, without a lock. */
void enforce_limit(struct arenas *arenas);

#endif
