/*
 * Trimming: cuts the free top off every arena that has too much of it, with as few shootdowns as possible.
 * Called by the trim decision, and for a request from outside.
 */
#ifndef PTLBMALLOC2_TRIM_H
#define PTLBMALLOC2_TRIM_H

#include <stddef.h>

/*
 * Cuts each top that exceeds twice keep_bytes down to keep_bytes (ptlbmalloc2, section 6.2.3). Busy arenas
 * are left for the next trim. The caller holds state.busy and no arena. Returns the resident bytes given
 * back.
 */
size_t trim_arenas(size_t keep_bytes);

#endif
