/*
 * Flushing: blocks in CPUs' caches and depots go back to the heap, which purges what then exceeds the limit.
 */
#ifndef CALM_GOVERNOR_FLUSH_H
#define CALM_GOVERNOR_FLUSH_H

#include "governor/state.h"

/* Flushes what no thread wanted during the epoch from the depots, and CPUs' caches that were idle for several
 * epochs; or all of both. Under the purger's lock. */
void flush_caches(struct governor *governor, bool all);

/* Blocks in the caches and depots, and their bytes, about. */
size_t governor_cached(const struct governor *governor, size_t *bytes);

/* Free memory exceeds the limit: purges, or waits for the thread that does. Any thread, without a lock. */
void enforce_limit(struct governor *governor);

#endif
