/*
 * The purger: gives free memory of the heap back to the kernel, slice by slice. A slice is taken out of the
 * heap's free set first, and the kernel is asked without the heap's lock. The caller holds the purger's, also
 * a CPU cache's where a flush of that cache purges, and the profile's before a fork.
 */
#ifndef CALM_GOVERNOR_PURGER_H
#define CALM_GOVERNOR_PURGER_H

#include "governor/state.h"

/*
 * One purger at a time. purger_enter waits for another thread's purge, unless the heap is in exclusive mode
 * or its purger may be stopped: then, as purger_try, it returns false, and the purge under way sees to what
 * is over the limit. The thread of exclusive mode may come here within its own purge, since it serves its
 * clients between two slices.
 */
bool purger_try(struct governor *governor);
bool purger_enter(struct governor *governor);
void purger_leave(struct governor *governor);

/* Whether purger_enter waits. */
bool purger_may_wait(const struct governor *governor);

/*
 * Purges until at most keep pages stay free. What costs more than it is worth stays while it is no more than
 * bear pages: short ranges within slabs where each range is a shootdown, and parts of huge pages. Returns
 * the number of pages purged. Under the purger's lock.
 */
size_t purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason);

/* Purges until free memory is within the limit, which sinks with the footprint: so it is checked again. Under
 * the purger's lock. */
void purge_to_limit(struct governor *governor);

/* Where address space is limited, gives back that of clean runs. retracts: no memory is needed for now, so
 * what is usable at the heap's end becomes reserved again. Under the purger's lock. */
void release_clean(struct governor *governor, bool retracts);

#endif
