/* Trimming: cutting the free top off every arena that holds too much, in as few shootdowns as possible. */
#ifndef PTLBMALLOC2_TRIM_H
#define PTLBMALLOC2_TRIM_H

#include <stddef.h>

struct arena;
struct governor;

/*
 * Trims every arena whose top exceeds twice keep_bytes down to keep_bytes (ptlbmalloc2, section 6.2.3).
 * Busy arenas are left for the next time. The caller holds governor->busy and no arena. Returns the
 * resident bytes given back.
 */
size_t trim_arenas(struct governor *governor, struct arena *main_arena, size_t keep_bytes, size_t page_bytes);

#endif
