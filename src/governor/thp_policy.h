/*
 * The THP policy: what the program is expected to do with its large blocks, by their size class, of which
 * there are two to each doubling.
 *
 * A class whose blocks were touched as a whole is served from memory that is resident, and, with more
 * evidence, from huge pages. One without evidence, or whose blocks were not touched, gets memory that is not,
 * so that what the program does not touch costs none.
 *
 * The evidence is samples by mincore, at a few pages, of blocks that were handed out of memory that was not
 * resident: when they are freed, and, of every few, long after they were handed out and while they still are
 * in use. Other blocks tell nothing, as they are resident whether touched or not; so one in a few of each
 * class is a control: it has no huge pages, and those of its pages that are sampled are purged before it is
 * handed out.
 *
 * And huge pages are requested only where they are cheap: one takes 0.1 ms where the machine has one free,
 * but 4 ms where the host of a virtual machine must find the memory first, more than small pages would. So
 * the first touch of each new region is timed, and after a costly one none is requested for a while, twice as
 * long each time.
 */
#ifndef CALM_GOVERNOR_THP_POLICY_H
#define CALM_GOVERNOR_THP_POLICY_H

#include "heap/large_blocks.h"

#include <stdatomic.h>
#include <sys/uio.h>

#define THP_RECENT_BLOCKS 64
/* Blocks of fewer pages have no class, and are never in a huge-page region. */
#define THP_MIN_PAGES 16
#define THP_CLASSES   64

struct thp_class {
    _Atomic(uint8_t) score;
    uint8_t handed_out; /* blocks, modulo 256 */
    uint8_t freed;      /* likewise */
};

struct thp_policy {
    struct thp_class classes[THP_CLASSES];
    uint64_t blocks;
    void *recent[THP_RECENT_BLOCKS];
    uint64_t sampled_at; /* blocks when one was last sampled */
    _Atomic(unsigned)
        interval; /* additional blocks between two samples: grows while the answer stays the same */
    _Atomic(uint64_t) costly_until_ns; /* 0: the last region was cheap */
    _Atomic(uint64_t) costly_ns;       /* length of the last pause */
};

enum thp_evidence {
    THP_NONE,
    THP_CONTROL, /* blocks of the class were touched as a whole, as far as can be told; this one is a control
                  */
    THP_TOUCHED,
    THP_SURE, /* so many were that huge pages are earned */
};

/* What is expected of the next block of so many pages, which is counted. Under the heap's lock. */
enum thp_evidence thp_policy_expect(struct thp_policy *policy, size_t pages);

/* Whether the pause lasts that follows a new huge-page region that cost more than small pages would have. */
bool thp_policy_is_costly(const struct thp_policy *policy);

/* Notes a new large block. Returns the pages of an older one to be sampled; none: 0 bytes. Under the heap's
 * lock. */
struct iovec thp_policy_note(struct thp_policy *policy, const struct heap *heap, const struct span *span);

/* Whether a large block that is about to be freed is to be sampled. Any thread: its owner. */
bool thp_policy_samples_freed(struct thp_policy *policy, const struct span *span);

/* What the first touch of a new huge-page region took, and what small pages would have taken. Any thread. */
void thp_policy_note_cost(struct thp_policy *policy, uint64_t ns, double small_ns);

/* The page-aligned ranges of a block that are sampled; returns how many. Pure. */
#define THP_SAMPLED_RANGES 2
size_t thp_policy_sampled(const char *base, size_t bytes, size_t page_size, struct iovec *ranges);

/* Samples the residency of some pages of a block, by two system calls at most, without a lock. freed: it will
 * not be touched any more. Any thread. */
void thp_policy_sample(struct thp_policy *policy, const char *base, size_t bytes, size_t page_size,
                       bool freed);

#endif
