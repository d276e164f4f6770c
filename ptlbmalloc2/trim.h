/*
 * Trimming: cuts the free top off every arena that has too much of it, with as few shootdowns as possible.
 * Also the decision when a check is to look at all arenas, and whether a trim then gains anything. Called by
 * the governor.
 */
#ifndef PTLBMALLOC2_TRIM_H
#define PTLBMALLOC2_TRIM_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Cuts each top that exceeds twice keep_bytes down to keep_bytes (ptlbmalloc2, section 6.2.3). Busy arenas
 * are left for the next trim. The caller holds state.busy and no arena. Returns the resident bytes given
 * back.
 */
size_t trim_arenas(size_t keep_bytes);

/*
 * Whether a walk may find more to trim than the threshold allows to stay, by the records. top_grew: the frees
 * of the checking thread have made its arena's top grow by much, as opposed to a merge. Any thread.
 */
bool trim_is_due(bool top_grew);

/*
 * After a walk: trims if more than the threshold is free and resident. Then sets how much more must be freed,
 * or become free by merging with a top, before the next walk is due. The caller holds state.busy and no
 * arena.
 */
void trim_if_needed(void);

#endif
