/*
 * Whether a program touches the large blocks that it asks for, all of them: only then huge pages are earned.
 *
 * Every few large blocks one is looked at, long after it was handed out and while it still is in use: by
 * mincore, at a few of its pages. Blocks in huge regions say nothing, being resident whether touched or not;
 * so one block in sixteen is never put there.
 *
 * And only where they are cheap: a huge page takes 0.1 ms where the machine has one, but 4 ms where a virtual
 * machine's host must find the memory first, more than the small pages in its place. So the first touch of
 * each new region is timed, and after a dear one there are none for a while, twice as long each time.
 */
#ifndef CALM_GOVERNOR_DENSITY_H
#define CALM_GOVERNOR_DENSITY_H

#include "heap/heap.h"

#include <stdatomic.h>

#define DENSITY_RECENT 64
/* Pages of blocks that may lie in huge regions. */
#define DENSITY_PAGES_LEAST 16

struct density {
    uint64_t blocks;
    void *recent[DENSITY_RECENT];
    uint64_t looked;            /* blocks when one was last picked */
    _Atomic(unsigned) patience; /* more blocks between two looks: it grows while what is seen was not touched,
                                   or was for long */
    _Atomic(int) score;
    _Atomic(uint64_t) dear_until_ns; /* 0: the last one was cheap */
    _Atomic(uint64_t) dear_ns;       /* how long the last pause was */
};

/* Whether the next large block should lie in a huge region. Under the heap's lock. */
bool density_is_high(const struct density *density);

/* Whether the next large block will be touched, all of it, as far as can be told; of one in sixteen nothing
 * is said, so that there are some to be judged. Under the heap's lock. */
bool density_expects_touch(const struct density *density);

/* Whether the last new huge region cost more than small pages would have, and the pause that follows lasts.
 */
bool density_is_dear(const struct density *density);

/* Notes a new large block by its first page. Returns an older one to be judged, or NULL. Under the heap's
 * lock. */
const struct span *density_note(struct density *density, const struct heap *heap, void *base);

/* What the first touch of a new huge region took, against what it would have taken by small pages. Any
 * thread. */
void density_note_cost(struct density *density, uint64_t ns, double small_ns);

/* Looks at some pages of a block. Any thread; without a lock, one system call. */
void density_judge(struct density *density, const char *base, size_t bytes, size_t page_size);

#endif
