/*
 * The governor as a whole: its start, its mode, what a user asks of it, and forks. It knows the heap, the
 * depots and the CPUs' caches, asks the policy how much free memory may stay, and purges the rest.
 *
 * Blocks are handed out by blocks.h and large.h; each thread checks the limit when it leaves the heap
 * (check.h); a purge (purger.h) takes its ranges out of the free set first, and asks the kernel without the
 * heap's lock.
 */
#ifndef CALM_GOVERNOR_GOVERNOR_H
#define CALM_GOVERNOR_GOVERNOR_H

#include "governor/state.h"

/* Address space that a heap can reach; at first only its first segment is reserved. */
#define HEAP_SPACE_BYTES ((size_t)1 << 40)

/* settings must be filled. False if there is no memory at all. */
bool governor_init(struct governor *governor, const struct size_classes *classes, struct cpu_caches *caches,
                   size_t address_space, bool with_depots,
                   void (*misused)(const struct misuse_record *misuse));

/* Exclusive mode, and what shared mode means for a heap that is in exclusive mode at other times. */
enum governor_mode {
    MODE_EXCLUSIVE,    /* its thread calls governor_tick */
    SHARED_BACKGROUND, /* a server does */
    SHARED_FOREGROUND, /* the threads that come to the heap do */
    SHARED_FOR_GOOD,   /* they do, and report misuse themselves: there are no clients any more */
};

/* Only while no thread is within the heap; governor->ops must be set before the first exclusive mode. */
void governor_set_mode(struct governor *governor, enum governor_mode mode);

/* Purges all but keep_bytes of free memory, that of caches and depots included. Returns the bytes purged. Any
 * thread. */
size_t governor_trim(struct governor *governor, size_t keep_bytes);

/* The same for the helper or server, which leaves misuse that comes to light to the program's threads. */
size_t governor_trim_by_helper(struct governor *governor, size_t keep_bytes);

/* Settings changed: the limit follows. */
void governor_refresh(struct governor *governor);

/* Copies the policy and the price of memory, as far as it does not change by itself. The others are off for
 * offload mode's second heap, which has no helper, huge pages or placement. */
void governor_copy_settings(struct governor *governor, const struct governor *from);

/* Whether the caller holds a lock of the heap, of depots or of caches. */
bool governor_is_held(const struct governor *governor);

/*
 * Before governor_before_fork, in shared mode. Free memory that is kept for later is worth less over a fork:
 * each of its small pages costs a fault afterwards in any case, and the child has it, too, until it purges
 * it. So what may not stay without a helper is purged, once in the break-even time. Does nothing in a signal
 * handler that interrupted the governor.
 */
void governor_shrink_for_fork(struct governor *governor);

/* Around fork: no other thread is within the heap, the depots or the caches meanwhile. Not needed in a
 * process of one thread, whose child only calls governor_start_child. */
void governor_before_fork(struct governor *governor);
void governor_after_fork(struct governor *governor, bool child);
void governor_start_child(struct governor *governor);

#endif
