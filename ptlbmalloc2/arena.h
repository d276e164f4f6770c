/*
 * Operations on one of glibc's arenas: lock it, measure its free top, claim pages ahead of the top, cut pages
 * off it. Each change updates glibc's own accounting as glibc itself would.
 *
 * For arenas that were proved (glibc_proof.h). Unless stated otherwise, the caller holds the arena's lock.
 */
#ifndef PTLBMALLOC2_ARENA_H
#define PTLBMALLOC2_ARENA_H

#include "glibc_layout.h"

/* A thread must not wait for an arena with others locked: it could deadlock with fork(), which locks them
 * all. glibc locks no arena while the process has one thread; the caller is then that thread. */
bool arena_trylock(struct arena *arena);
void arena_unlock(struct arena *arena);

static inline size_t arena_top_bytes(const struct arena *arena) {
    return chunk_bytes(arena_body(arena)->top);
}

static inline char *arena_top_end(const struct arena *arena) {
    return (char *)arena_body(arena)->top + arena_top_bytes(arena);
}

/* Bytes that an arena other than the main one can hand out from its top heap without a system call. */
size_t arena_usable_bytes(const struct arena *arena);

/*
 * Makes the next pages of the top heap usable, so that arena_usable_bytes is at least wanted_bytes; less
 * where the heap ends. Not for the main arena. Returns the bytes claimed; 0 if none was needed or the system
 * refused. After ptlbmalloc2, section 6.2.2; glibc counts them as its own grow_heap would (mprotect_size).
 *
 * If huge_page_bytes is not 0, the claim stops a page short of the end of the next huge page: if all of it
 * were usable before its first touch, that touch would make all of it resident.
 */
size_t arena_claim(const struct arena *arena, size_t wanted_bytes, size_t huge_page_bytes);

/* Free top space that a trim can reach: none if the main arena's top does not end at the break. */
size_t arena_trimmable_bytes(const struct arena *arena);

/* How much can be cut off the top if keep_bytes and the top chunk's header stay, in whole pages. */
size_t arena_excess_bytes(const struct arena *arena, size_t keep_bytes);

/* Cuts purged bytes off the end of a top, as shrink_heap would. Not for the main arena. */
void arena_cut_purged(struct arena *arena, size_t bytes);

/* Lowers the break by `bytes` and cuts the main arena's top, as systrim would. Returns the bytes released. */
size_t arena_release_main(size_t bytes);

#endif
