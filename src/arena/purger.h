/*
 * The purger returns free memory of the heaps to the kernel, slice by slice. It
 * takes a slice out of the free sets of the heaps first, one heap's lock at a
 * time, and then calls the kernel without these locks. The calling thread holds the purger's lock. It also
 * holds a CPU cache's lock while a flush of that cache purges, and the
 * profile's locks before a fork.
 */
#ifndef CALM_ARENA_PURGER_H
#define CALM_ARENA_PURGER_H

#include "arena/state.h"

/* Acquire and release the purger's lock, so that one thread purges at a time.
 * purger_enter waits for another thread's purge, purger_try does not. */
bool purger_try(struct arenas *arenas);
void purger_enter(struct arenas *arenas);
void purger_leave(struct arenas *arenas);

/*
 * Purges until at most `keep` pages stay free. Returns the number of pages
 * purged. The caller holds the purger's lock.
 *
 * Some pages cost more to purge than they are worth: parts of huge pages, and,
 * if each range takes a shootdown of its own, short ranges within slabs. These
 * stay while at most `tolerated` pages are free.
 */
size_t purge_down(struct arenas *arenas, size_t keep, size_t tolerated, enum reason reason);

/* Purges until free memory is within the limit. The limit sinks with the
 * footprint, and so each purge is followed by another check. The caller holds
 * the purger's lock. */
void purge_to_limit(struct arenas *arenas);

/* Called if the program needs no memory for now. The clean pages at the end of
 * each heap become reserved again. Under a limit on address space, releases the
 * addresses of clean runs. The caller holds the purger's lock. */
void release_clean(struct arenas *arenas);

#endif
