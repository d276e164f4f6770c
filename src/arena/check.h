/*
 * The check of the limit. Each thread that takes blocks from a heap or puts them
 * into it makes this check when it leaves, if a report of its heap is due
 * (is_report_due). The check allows for what the reports may lack. Free memory
 * therefore does not exceed the limit after a thread has left, even if no code of
 * the allocator runs afterwards. There are two exceptions: a purge that the kernel
 * refuses, and, with several arenas, terms that changed since the epoch began.
 */
#ifndef CALM_ARENA_CHECK_H
#define CALM_ARENA_CHECK_H

#include "arena/state.h"

/* Called after heap_lock. Releases the heap's lock. Then purges if too much
 * memory is free, reports invalid frees that came to light, ends the epoch if
 * it is over, and starts a helper if one is missing. */
void heap_unlock_and_check(struct arenas *arenas, struct arena *arena);

#endif
