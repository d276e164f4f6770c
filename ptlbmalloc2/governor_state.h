/* What the governor keeps of the arenas, and counts. Shared by the governor and the trim, which runs on its
 * behalf. */
#ifndef PTLBMALLOC2_GOVERNOR_STATE_H
#define PTLBMALLOC2_GOVERNOR_STATE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "os/cpu_usage.h"
#include "os/residency.h"

struct arena;

#define GOVERNOR_MAX_ARENAS 8192 /* glibc makes 8 for each CPU; arenas beyond are left alone */

struct record {
    struct arena *_Atomic arena;  /* NULL: free, as are all records behind it */
    _Atomic(size_t) top_bytes;    /* free top space when last seen */
    _Atomic(size_t) system_bytes; /* held from the system when last seen */
};

struct governor_counters {
    _Atomic(size_t) trims, bytes_trimmed, bytes_purged, ranges, vectored_calls, single_calls, break_calls;
    _Atomic(size_t) failed_purges, busy_arenas, walks, claims, bytes_claimed, threshold_changes;
    _Atomic(size_t) mmap_threshold_raises, placed_blocks;
};

/* All zero is the valid initial state, and what a forked child finds. */
struct governor {
    _Atomic(int) busy;
    _Atomic(bool) trim_wanted; /* somebody found a trim due, and may have found `busy` taken */
    _Atomic(size_t) total_top_bytes, total_system_bytes; /* the sums of the records */
    _Atomic(size_t) arenas;                              /* records in use */
    _Atomic(size_t) turn;                                /* whose record is refreshed next */
    _Atomic(size_t) threshold_bytes, pad_each_bytes;     /* in force */
    _Atomic(size_t) freed_bytes;                         /* by all threads, as of their last looks */
    /* The last walk, and how much may come free after it before the next is due. */
    _Atomic(size_t) freed_bytes_at_walk, top_bytes_at_walk, slack_bytes;
    _Atomic(size_t) cpus_hundredths;
    struct cpu_usage cpu_usage;                    /* of who holds `busy` */
    unsigned char scratch[RESIDENCY_WINDOW_PAGES]; /* likewise */
    struct governor_counters stats;
    struct record records[GOVERNOR_MAX_ARENAS];
};

static inline void governor_count(_Atomic(size_t) *counter, size_t by) {
    atomic_fetch_add_explicit(counter, by, memory_order_relaxed);
}

/* Notes a locked arena's figures. False if it is new and not laid out as known: then hands off. */
bool governor_record(struct governor *governor, struct arena *arena);

#endif
