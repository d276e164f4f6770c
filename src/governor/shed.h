/*
 * Shedding: what lies in CPUs' caches and depots is taken back into the heap, and from there, as far as it
 * exceeds the bound, given back.
 */
#ifndef CALM_GOVERNOR_SHED_H
#define CALM_GOVERNOR_SHED_H

#include "governor/governor.h"

/* What no thread wanted during the window leaves the depots, and after a few windows idle CPUs' caches; or
 * all of it leaves. Under the purger's lock. */
void shed_caches(struct governor *governor, bool all);

/* Free memory exceeds the bound: gives back, or waits for the thread that is at it. */
void relieve(struct governor *governor);

#endif
