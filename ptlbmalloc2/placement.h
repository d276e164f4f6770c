/*
 * Where in its page a large block begins that glibc has mapped on its own (PTLBMALLOC2_PLACEMENT=1).
 *
 * glibc begins each such block 16 bytes behind the start of a page, so that all of them fight for one set of
 * the cache next to the CPU, and loads of one wait for stores to another that look the same to 4 KiB (Valat,
 * sections 4.2, 4.4 and 5.3). Here the program gets an address so many cache lines further on, where the last
 * page has room for that.
 *
 * glibc never sees it. Its own header at the page's start stays as it is; a second one before the program's
 * block says how far back that is (prev_size, as glibc has it for mapped blocks that are aligned). Whatever
 * goes to glibc goes there by its own address: glibc takes only a few places in a page for its own, and ends
 * the process over any other.
 *
 * The calls of glibc's malloc are the caller's. Thread-safe.
 */
#ifndef PTLBMALLOC2_PLACEMENT_H
#define PTLBMALLOC2_PLACEMENT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "options.h"

/* Proves on a block of its own that it works, if asked to, and starts. At most once, after governor_start. */
void placement_start(const struct options *options);

extern _Atomic(bool) placement_started;

static inline bool placement_is_on(void) {
    return atomic_load_explicit(&placement_started, memory_order_relaxed);
}

/* NULL where it is on. */
const char *placement_why_not(void);

/* Smaller blocks are not placed: glibc does not map them, or they are of a few pages. */
size_t placement_least_bytes(void);

/*
 * How much to ask of glibc for a block of so many bytes: for a very large one whose last page would have too
 * little room, up to a page more.
 */
size_t placement_ask(size_t bytes);

/*
 * The program's address of a block that glibc has just given for at least so many bytes, the first `kept` of
 * which hold something: moved on, or as it was. NULL for NULL.
 */
void *placement_place(void *block, size_t bytes, size_t kept);

/* glibc's own address of a mapped block, wherever it was placed. */
void *placement_glibcs(void *block);

/*
 * After glibc has reallocated a block of its own address that was placed `shift` bytes behind it: the
 * program's address again, with the first `kept` bytes. NULL for NULL.
 */
void *placement_keep(void *block, size_t shift, size_t kept);

#endif
