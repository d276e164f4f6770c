/*
 * Placement (PTLBMALLOC2_PLACEMENT=1): where in its page a large block starts that glibc has mapped on its
 * own.
 *
 * glibc starts each such block 16 bytes after the start of a page, so that all of them compete for one set of
 * the L1 cache, and a load from one waits for a store to another at the same offset (Valat, sections 4.2, 4.4
 * and 5.3). Here the program gets an address some cache lines later, if the last page has room for that.
 *
 * glibc does not see the shift. Its own header at the start of the page stays as it is; a second one before
 * the program's block says how far back that is (prev_size, as in glibc's aligned mapped blocks). Each call
 * passes glibc its own address: glibc accepts only a few offsets in a page, and aborts the process over any
 * other.
 *
 * Called by malloc.c, which itself calls glibc's malloc. Thread-safe.
 */
#ifndef PTLBMALLOC2_PLACEMENT_H
#define PTLBMALLOC2_PLACEMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* If the options ask for it and a test on a block of its own succeeds. At most once, after governor_start. */
void placement_start(void);

extern _Atomic(bool) placement_started;

static inline bool placement_is_on(void) {
    return atomic_load_explicit(&placement_started, memory_order_relaxed);
}

/* Why it is not on: constant text, empty if it is on. */
extern const char *placement_why_not;

/* Smaller blocks are not placed: glibc does not map them, or they take a few pages only. */
size_t placement_min_bytes(void);

/* What to request from glibc for a block: up to a page more if it is large and its last page has no room. */
size_t placement_request_bytes(size_t bytes);

/*
 * The program's address of a block that glibc has just returned for at least so many bytes, the first `kept`
 * of which have contents: shifted, or unchanged. NULL for NULL.
 */
void *placement_place(void *block, size_t bytes, size_t kept);

/* glibc's own address of a mapped block, whether it was placed or not. */
void *placement_original(void *block);

/*
 * After glibc has reallocated, by its own address, a block that was placed `shift` bytes behind it: the
 * program's address again, with the first `kept` bytes. NULL for NULL.
 */
void *placement_restore(void *block, size_t shift, size_t kept);

#endif
