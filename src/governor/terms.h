/*
 * The terms of the limit: what the policy is given for an epoch, and whether the heap is tended, that is,
 * whether a helper or a server will call governor_tick even if the program stays idle. A tended heap may keep
 * more.
 */
#ifndef CALM_GOVERNOR_TERMS_H
#define CALM_GOVERNOR_TERMS_H

#include "governor/purger.h"
#include "governor/state.h"

/* The terms that follow from what is known now. Under the purger's lock, or while no other thread knows the
 * governor. */
struct retention_terms new_terms(const struct governor *governor);

/* Sets new terms for the same footprint; what exceeds them is purged before they are published. Under the
 * purger's lock. */
void update_terms(struct governor *governor, enum reason reason);

/* Sets whether the heap is tended; the next thread at the heap purges what exceeds the new limit. Under the
 * heap's lock, or while no thread is within the heap. */
void set_tended(struct governor *governor, bool tended);

/* From now on the heap is tended; or that is not certain any more, and what exceeds the lower limit is purged
 * first. The latter waits for another purger. Any thread. */
void governor_tend(struct governor *governor);
void governor_untend(struct governor *governor);

#endif
