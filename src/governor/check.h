/*
 * The check of the limit: each thread that took from the heap, or put into it, makes it as it leaves. So free
 * memory does not exceed the limit once a thread has left, whether or not any code of the allocator runs
 * afterwards; unless the kernel refuses the purge, or a purge is under way that no thread waits for
 * (purger.h).
 */
#ifndef CALM_GOVERNOR_CHECK_H
#define CALM_GOVERNOR_CHECK_H

#include "governor/state.h"

/* After heap_lock. Purges if too much is free, reports misuse that came to light, ends the epoch if it is
 * over, and starts a helper where one is missing. */
void heap_unlock_and_check(struct governor *governor);

/* Misuse that came to light since the last call, up to MISUSE_RECORDS; returns how many. Without a
 * lock; in exclusive mode on its thread. */
size_t governor_take_misuse(struct governor *governor, struct misuse_record *notes);

#endif
