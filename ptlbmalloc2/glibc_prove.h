/*
 * The proof that the running glibc is laid out as glibc_layout.h says.
 *
 * At start-up the main arena is searched for in libc's own data and compared with what mallinfo(3) reports.
 * Every other arena is walked when it is first met, before anything of it is used: its heaps must name it,
 * chain back to the one it lives in, and add up to what it says it holds. Reads only; where anything
 * disagrees the answer is no.
 */
#ifndef PTLBMALLOC2_GLIBC_PROVE_H
#define PTLBMALLOC2_GLIBC_PROVE_H

#include "glibc_layout.h"

/*
 * The main arena, or NULL with *why set to a constant text. Calls glibc's malloc, free and mallinfo: not to
 * be called from inside them, nor with an arena locked.
 */
struct arena *glibc_prove_main_arena(const struct glibc_layout *layout, const char **why);

/* Whether `block`'s heap is a heap of ours to know: mapped, and named by an arena in the ring of
 * `main_arena`. */
bool glibc_prove_heap_of_block(const void *block, struct arena *main_arena);

/* Whether the (not main) arena, which the caller has locked, is laid out as known. */
bool glibc_prove_arena(const struct arena *arena, const struct glibc_layout *layout);

/* Whether the page of this address is mapped. */
bool glibc_is_mapped(const void *address);

#endif
