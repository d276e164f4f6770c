/*
 * What may be done to one of glibc's arenas from outside: lock it, see how much of its top is free, claim
 * pages ahead of its top, cut pages off it. Every change keeps glibc's own accounting exact, as if glibc had
 * made it. Called by the governor and by the trim, on arenas that were proved (glibc_prove.h).
 */
#ifndef PTLBMALLOC2_ARENA_H
#define PTLBMALLOC2_ARENA_H

#include "glibc_layout.h"

/*
 * Never waits: one who holds arenas and waits for another could meet fork(), which takes them all, halfway.
 * glibc leaves the lock alone while the process has one thread; that thread is then the caller.
 */
bool arena_trylock(struct arena *arena);
void arena_unlock(struct arena *arena);

/* The functions below want the arena locked. */

static inline size_t arena_top_bytes(const struct arena *arena) {
    return chunk_bytes(arena_body(arena)->top);
}

static inline char *arena_top_end(const struct arena *arena) {
    return (char *)arena_body(arena)->top + chunk_bytes(arena_body(arena)->top);
}

/* Bytes that a (not main) arena can hand out from its top heap without a system call. */
size_t arena_usable_bytes(const struct arena *arena);

/*
 * Makes the next pages of a (not main) arena's top heap usable, so that arena_usable_bytes is at least
 * wanted_bytes; less where the heap ends. Returns the bytes claimed; 0 if none was needed or the system
 * refused. After ptlbmalloc2, section 6.2.2; glibc counts them as its own grow_heap would (mprotect_size).
 *
 * Where huge_page_bytes is not 0, the claim stops a page short of the next huge page's end: were a huge
 * page's place usable before the first touch in it, that touch would make all of it resident.
 */
size_t arena_claim(const struct arena *arena, size_t wanted_bytes, size_t page_bytes, size_t huge_page_bytes);

/* Free top space that a trim can reach: none where the main arena's top does not end at the break. */
size_t arena_trimmable_bytes(const struct arena *arena, bool is_main);

/* How much of the top's end can go if keep_bytes stay free, in whole pages; the top chunk keeps its header.
 */
size_t arena_excess_bytes(const struct arena *arena, bool is_main, size_t keep_bytes, size_t page_bytes);

/* The last `bytes` of a (not main) arena's top were purged: count them as returned, as shrink_heap would. */
void arena_cut_purged(struct arena *arena, size_t bytes);

/* Lowers the break by `bytes` and cuts the main arena's top by what was released, as systrim would. Returns
 * that. */
size_t arena_release_main(struct arena *main_arena, size_t bytes);

#endif
