/*
 * The terms of the limit: what the policy is given for an epoch, and whether there is a background purge:
 * whether a helper or a server will call governor_tick even if the program stays idle. With one the heap may
 * keep more.
 */
#ifndef CALM_GOVERNOR_TERMS_H
#define CALM_GOVERNOR_TERMS_H

#include "governor/purger.h"
#include "governor/state.h"

/* Sets the default price: the bytes of memory, divided by the CPUs that the process may run on, or by the
 * quota if that is lower. Any thread. */
void note_offer(struct governor *governor, size_t memory, double cpu_quota);

/* The price of memory: the bytes that, kept for a second, are worth a second of CPU time. Less while memory
 * is scarce, or other processes of the family keep some. Under the purger's lock. */
double memory_per_cpu_bytes(const struct governor *governor);

/* The terms that follow from what is known now. Under the purger's lock, or while no other thread knows the
 * governor. */
struct retention_terms new_terms(const struct governor *governor);

/* Sets new terms for the same footprint; what exceeds them is purged before they are published. Under the
 * purger's lock. */
void update_terms(struct governor *governor, enum reason reason);

/* Sets whether there is a background purge; the next thread at the heap purges what exceeds the new limit.
 * Under the heap's lock, or while no thread is within the heap. */
void set_background_purge(struct governor *governor, bool background_purge);

/* From now on there is a background purge; or that is not certain any more, and what exceeds the lower limit
 * is purged first. The latter waits for another purger. Any thread. */
void governor_start_background(struct governor *governor);
void governor_stop_background(struct governor *governor);

#endif
