/*
 * The proof that the running glibc has the layout of glibc_layout.h.
 *
 * At start-up the main arena is searched for in libc's own data and compared with mallinfo(3). Every other
 * arena is verified when the library first meets it, before any of its fields is used: its heaps must point
 * to it, their links must lead back to the heap that contains it, and their sizes must add up to its own.
 * All functions only read, and answer "no" on any mismatch.
 */
#ifndef PTLBMALLOC2_GLIBC_PROOF_H
#define PTLBMALLOC2_GLIBC_PROOF_H

#include "glibc_layout.h"

/*
 * Sets glibc_main_arena and returns NULL, or returns a constant text that says what is wrong. Calls glibc's
 * malloc, free and mallinfo: not to be called from inside them, nor with an arena locked.
 */
const char *glibc_prove_main_arena(void);

/* Whether the heap that would contain `block` is mapped, and belongs to an arena in the ring. */
bool glibc_prove_heap_of_block(const void *block);

/* Whether an arena other than the main one, which the caller has locked, has the known layout. */
bool glibc_prove_arena(const struct arena *arena);

/* Whether the page of this address is mapped. Preserves errno. */
bool glibc_is_mapped(const void *address);

#endif
