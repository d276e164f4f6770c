/* Epochs. At the end of an epoch the arena reports to the policy how much
 * memory was used, sets the terms of the limit from the answer, and purges what
 * has been unused for too long. */
#ifndef CALM_ARENA_EPOCH_H
#define CALM_ARENA_EPOCH_H

#include "arena/state.h"

/* Ends the epoch if it is over: flushes the caches, and purges what has been
 * unused for too long. Returns whether nothing is left to purge. Any thread may
 * call it, the helper too. `own_files` says whether the calling thread has a
 * table of open files of its own. */
bool epoch_advance(struct arenas *arenas, bool own_files);

/* Reads how much memory the process may still take, at most once a second. The
 * start calls it, too, since a program may forbid the reading later.
 * `own_files` is true if the calling thread has a table of open files of its
 * own, or if there is no other thread yet. */
void epoch_read_machine(struct arenas *arenas, bool own_files);

/* Returns whether no thread came to the heap since the last epoch ended. */
bool epoch_is_untouched(struct arenas *arenas);

/* Returns whether all dirty memory could stay without a background purge. */
bool epoch_keeps_little(struct arenas *arenas);

#endif
