/*
 * The purger: gives free memory of the heap back to the kernel, slice by slice. A slice is taken out of the
 * free set first, and the kernel asked without any lock but the purger's own.
 */
#ifndef CALM_GOVERNOR_PURGER_H
#define CALM_GOVERNOR_PURGER_H

#include "governor/governor.h"

enum reason { REASON_LIMIT, REASON_TIME, REASON_ASKED };

/*
 * One purger at a time. The owner of a heap may come here while it purges, since it serves its clients
 * between two slices: then the purge under way sees to what is over.
 */
bool purger_try(struct governor *governor);
bool purger_enter(struct governor *governor); /* the same, but waits for another thread */
void purger_leave(struct governor *governor);

/*
 * Gives back until at most keep pages stay. What costs more than it is worth, short ranges within slabs where
 * each range is a shootdown, and parts of huge pages, stays for as long as it is no more than bear pages.
 * Returns whether anything was given back. Under the purger's lock.
 */
bool purge_down(struct governor *governor, size_t keep, size_t bear, enum reason reason);

/*
 * Gives back until free memory is within the bound, which sinks with the footprint: so it looks again. Under
 * the purger's lock.
 */
void purge_to_limit(struct governor *governor);

/* New terms for the same footprint: what exceeds them goes before they are published. Under the purger's
 * lock. */
void purger_set_terms(struct governor *governor, enum reason reason);

#endif
