/*
 * The THP policy: whether the program earns huge pages for its large blocks.
 *
 * It does if it touches all of its large blocks. Of every few large blocks one is sampled, long after it was
 * handed out and while it still is in use: by mincore, at a few of its pages. Blocks in huge-page regions
 * tell nothing, as they are resident whether touched or not; so one block in sixteen is never put there.
 *
 * And only where huge pages are cheap: one takes 0.1 ms where the machine has one free, but 4 ms where the
 * host of a virtual machine must find the memory first, more than small pages would. So the first touch of
 * each new region is timed, and after a costly one none is requested for a while, twice as long each time.
 */
#ifndef CALM_GOVERNOR_THP_POLICY_H
#define CALM_GOVERNOR_THP_POLICY_H

#include "heap/large_blocks.h"

#include <stdatomic.h>
#include <sys/uio.h>

#define THP_RECENT_BLOCKS 64
/* Blocks of fewer pages are never in a huge-page region. */
#define THP_MIN_PAGES 16

struct thp_policy {
    uint64_t blocks;
    void *recent[THP_RECENT_BLOCKS];
    uint64_t sampled_at; /* blocks when one was last sampled */
    _Atomic(unsigned)
        interval; /* additional blocks between two samples: grows while the answer stays the same */
    _Atomic(int) score;
    _Atomic(uint64_t) costly_until_ns; /* 0: the last region was cheap */
    _Atomic(uint64_t) costly_ns;       /* length of the last pause */
};

/* Whether the next large block should lie in a huge-page region. Under the heap's lock. */
bool thp_policy_allows(const struct thp_policy *policy);

/* Whether the next large block is expected to be touched as a whole. False for one in sixteen, so that some
 * can be sampled. Under the heap's lock. */
bool thp_policy_expects_touch(const struct thp_policy *policy);

/* Whether the pause lasts that follows a new huge-page region that cost more than small pages would have. */
bool thp_policy_is_costly(const struct thp_policy *policy);

/* Notes a new large block by its first page. Returns the pages of an older one to be sampled; none: 0 bytes.
 * Under the heap's lock. */
struct iovec thp_policy_note(struct thp_policy *policy, const struct heap *heap, void *base);

/* What the first touch of a new huge-page region took, and what small pages would have taken. Any thread. */
void thp_policy_note_cost(struct thp_policy *policy, uint64_t ns, double small_ns);

/* Samples the residency of some pages of a block, by one system call without a lock. Any thread. */
void thp_policy_sample(struct thp_policy *policy, const char *base, size_t bytes, size_t page_size);

#endif
