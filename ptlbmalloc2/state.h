/*
 * Everything of the library's that changes while it runs: counters, the records of the arenas, and what the
 * governor remembers from one check to the next.
 *
 * The kernel wipes it in a forked child (MADV_WIPEONFORK). A child of a threaded parent thus starts with no
 * lock taken, no record and its own statistics, and records all arenas at its first check. All zero is the
 * valid initial state.
 *
 * gVisor's kernel has no such advice. There the fork handler wipes the state. Handlers that run earlier in
 * the child find the parent's state. So does a child of _Fork or clone, for which no handler runs: if a
 * thread of the parent held `busy`, that child never trims.
 */
#ifndef PTLBMALLOC2_STATE_H
#define PTLBMALLOC2_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "numbers.h"
#include "os/cpus.h"
#include "os/residency.h"

struct arena;

/* Counters that other processes can read, under these names (see report.c). */
#define PUBLISHED_COUNTERS(X)                                                                   \
    X(threshold_bytes)       /* the trim threshold in force */                                  \
    X(pad_each_bytes)        /* the padding of each arena in force */                           \
    X(footprint_bytes)       /* held from the system by all arenas: the sum of their records */ \
    X(free_top_bytes)        /* free at the tops of all arenas, resident or not: likewise */    \
    X(arenas)                /* recorded ones */                                                \
    X(cpus_hundredths)       /* average number of CPUs used, in hundredths */                   \
    X(trims)                 /* that gave something back */                                     \
    X(bytes_trimmed)         /* address space cut off tops */                                   \
    X(bytes_purged)          /* the part of it that was resident */                             \
    X(ranges)                /* purged */                                                       \
    X(process_madvise_calls) /* that purged something */                                        \
    X(madvise_calls)         /* likewise */                                                     \
    X(break_calls)           /* trims of the main arena, by lowering the break */               \
    X(failed_purges)                                                                            \
    X(busy_arenas) /* left for the next trim */                                                 \
    X(walks)       /* over all arenas */                                                        \
    X(claims)      /* of padding */                                                             \
    X(bytes_claimed)                                                                            \
    X(threshold_changes)                                                                        \
    X(mmap_threshold_raises)
#define COUNTERS(X)       \
    PUBLISHED_COUNTERS(X) \
    X(placed_blocks) /* see placement.h */

struct counters {
#define X(name) _Atomic(size_t)(name);
    COUNTERS(X)
#undef X
};

/* The largest page, since pages are wiped whole. */
#ifdef __x86_64__
#define STATE_ALIGNMENT 4096
#else
#define STATE_ALIGNMENT 65536
#endif

#define MAX_ARENAS 8192 /* glibc makes 8 for each CPU; those beyond are not recorded */

struct arena_record {
    struct arena *_Atomic arena;  /* NULL: free, as are all records behind it */
    _Atomic(size_t) top_bytes;    /* free top space when last seen */
    _Atomic(size_t) system_bytes; /* held from the system when last seen */
};

struct state {
    _Alignas(STATE_ALIGNMENT) struct counters counters;
    _Atomic(size_t) freed_bytes; /* by all threads, as of their last checks */
    /* At the last trim decision: the first two counters, and how much may become free before the next one. */
    _Atomic(size_t) freed_bytes_then, free_top_bytes_then, slack_bytes;
    _Atomic(bool) busy;         /* the lock of those who walk and trim; they alone use the last two fields */
    _Atomic(bool) trim_wanted;  /* a thread found a trim due, and may have found `busy` taken */
    _Atomic(bool) clears;       /* large blocks of calloc lie in arenas */
    _Atomic(bool) pads_bounded; /* as it was when glibc's top_pad was set */
    _Atomic(size_t) turn;       /* of the arena whose record is updated next */
    struct cpu_usage cpu_usage;
    unsigned char scratch[RESIDENCY_CHUNK_PAGES];
    struct arena_record records[MAX_ARENAS];
};

extern struct state state;

/* Called once, before the state changes. */
void state_start(void);

/* Called by the fork handler in the child. Preserves errno. */
void state_after_fork(void);

/* A sum of records may pass through a value below zero for an instant. */
static inline size_t state_sum(_Atomic(size_t) *counter) {
    size_t sum = LOAD(counter);
    return (ptrdiff_t)sum < 0 ? 0 : sum;
}

#endif
