/*
 * Large blocks: where a new one lies, by what the THP policy expects of it, and how one grows, shrinks or
 * moves. Thread-safe in shared mode; in exclusive mode for its thread alone.
 */
#ifndef CALM_GOVERNOR_LARGE_H
#define CALM_GOVERNOR_LARGE_H

#include "governor/state.h"

/* A block of whole pages; *zero says whether it is known to be zero, which zeroed asks for. NULL if memory is
 * short. prefaults: the thread of exclusive mode may prefault the block, if all such blocks are touched. */
void *governor_take_large(struct governor *governor, size_t pages, size_t align_pages, bool zeroed,
                          bool prefaults, bool *zero);

void governor_put_large(struct governor *governor, void *block);

/* Resizes a large block to so many pages, in place or by moving its pages. Returns where it is now; NULL if
 * neither can be done, and then nothing changed. */
void *governor_resize_large(struct governor *governor, struct span *span, size_t pages);

#endif
