/*
 * The records of all arenas (state.h): what each held from the system and had free at its top when last seen,
 * and the sums over all of them, the counters footprint_bytes and free_top_bytes.
 *
 * An arena's record is written by the thread that has locked the arena. Arenas are locked by trylock only,
 * one at a time, so that no function here waits.
 */
#ifndef PTLBMALLOC2_ARENAS_H
#define PTLBMALLOC2_ARENAS_H

#include <stdbool.h>
#include <stddef.h>

struct arena;

/*
 * Updates the record of a locked arena; makes it at first, if there are not too many. False if the proof of
 * the arena failed: then nothing of it may be used.
 */
bool arenas_record(struct arena *arena);

/*
 * The same, if its figures changed by min_change, so that most checks write to no line that other threads
 * read. *top_grew: whether the top grew by that much.
 */
bool arenas_record_change(struct arena *arena, size_t min_change, bool *top_grew);

/*
 * Updates the record of one other arena, each in its turn, unless it is busy: at the end of a thread, glibc
 * frees the contents of its cache, and no check sees that.
 */
void arenas_update_next(void);

/* A walk: records every arena that is not busy. False if the proof of one failed. */
bool arenas_walk(void);

/*
 * How much of all recorded free top space is resident: the rest costs nothing, and purging it would gain
 * nothing. An upper bound: a busy arena counts whole, as last seen, and so does a top of at most twice
 * keep_bytes, which a trim would spare. The caller holds state.busy.
 */
size_t arenas_resident_bytes(size_t keep_bytes);

#endif
