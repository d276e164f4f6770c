/*
 * The terms of the limit are the policy's inputs for an epoch. One of them says
 * whether there is a background purge, that is, whether a helper will call
 * epoch_advance even if the program stays idle. With a background purge the
 * heap may keep more.
 */
#ifndef CALM_ARENA_TERMS_H
#define CALM_ARENA_TERMS_H

#include "arena/purger.h"
#include "arena/state.h"

/* Sets the default price: the bytes of memory, divided by the number of CPUs
 * that the process may run on, or by the quota if the quota is lower. Any
 * thread may call it. */
void note_offer(struct arenas *arenas, size_t memory, double cpu_quota);

/* Returns the price of memory: the bytes that, kept for a second, are worth a
 * second of CPU time. The price falls while memory is scarce, and while other
 * processes of the family keep free memory. The caller holds the purger's
 * lock. */
double memory_per_cpu_bytes(const struct arenas *arenas);

/* Returns the terms that follow from what is known now. The caller holds the
 * purger's lock, or no other thread knows the arena yet. */
struct retention_terms new_terms(const struct arenas *arenas);

/* Sets new terms. Purges the free memory that exceeds the new limit, and then
 * publishes the terms. The caller holds the purger's lock. */
void update_terms(struct arenas *arenas, enum reason reason);

/* Sets terms, and publishes the limit that follows from them. Purges nothing.
 * The caller holds the purger's lock, or no other thread knows the arenas
 * yet. */
void set_terms(struct arenas *arenas, const struct retention_terms *terms);

/* Sets whether there is a background purge. The next thread that leaves a heap
 * purges what exceeds the new limit. Any thread may call it. */
void set_background_purge(struct arenas *arenas, bool background_purge);

/* terms_start_background says that there is a background purge from now on.
 * terms_stop_background says that there may be none. It purges what exceeds the
 * lower limit, and waits for another thread's purge. Any thread may call
 * them. */
void terms_start_background(struct arenas *arenas);
void terms_stop_background(struct arenas *arenas);

#endif
