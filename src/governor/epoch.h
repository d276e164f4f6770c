/*
 * Epochs: at the end of each, the demand that it showed tells which free memory is worth keeping in the next,
 * and what lay unused for long enough is purged.
 */
#ifndef CALM_GOVERNOR_EPOCH_H
#define CALM_GOVERNOR_EPOCH_H

#include "governor/state.h"

/* Ends the epoch if it is over: flushes and purges what lay unused. Any thread, also the helper. own_files:
 * whether the thread has a table of open files of its own. True if nothing is left to purge. */
bool governor_tick(struct governor *governor, bool own_files);

/* Reads how much memory the process may take, once a second; also at its start, where that may not be read
 * later. own_files: as above, or no other thread is there yet. */
void governor_read_max_footprint(struct governor *governor, bool own_files);

/* Whether no thread came to the heap since the last epoch ended. */
bool governor_is_untouched(struct governor *governor);

/* Whether all free memory that may be resident could stay without a background purge. */
bool governor_keeps_little(struct governor *governor);

#endif
