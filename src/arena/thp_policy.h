/*
 * The THP policy: how the program is expected to use its large blocks. It
 * groups them into classes by size, two for each doubling.
 *
 * If blocks of a class were touched as a whole, the next ones get resident
 * memory, and with more evidence huge pages. If they were not, or if there is
 * no evidence yet, the next ones get clean memory. Pages that the program does
 * not touch then cost no memory.
 *
 * The evidence comes from samples: mincore tells which of a few pages of a
 * block are resident. Only blocks that were not resident when the program got
 * them are sampled. All other blocks are resident whether touched or not.
 * Samples are taken of freed blocks, and of one in a few blocks that stay in
 * use for long. One in several blocks of each class is therefore a control: it
 * has no huge pages, and the pages to be sampled are purged before the program
 * gets it.
 *
 * Huge pages are requested only where they are cheap. A huge page takes 0.1 ms
 * if the machine has one free. It takes 4 ms, more than small pages would, if
 * the host of a virtual machine must find the memory first. The first touch of
 * each new region is therefore timed. After a costly one no region is requested
 * for a while, and this pause doubles each time.
 */
#ifndef CALM_ARENA_THP_POLICY_H
#define CALM_ARENA_THP_POLICY_H

#include "heap/large_blocks.h"

#include <stdatomic.h>
#include <sys/uio.h>

#define THP_RECENT_BLOCKS 64
/* Blocks of fewer pages have no class, and are never in a huge-page region. */
#define THP_MIN_PAGES 16
#define THP_CLASSES   64

struct thp_class {
    _Atomic(uint8_t) score;
    uint8_t handed_out; /* number of blocks, modulo 256 */
    uint8_t freed;      /* number of freed blocks, modulo 256 */
};

struct thp_policy {
    struct thp_class classes[THP_CLASSES];
    uint64_t blocks;
    void *recent[THP_RECENT_BLOCKS];
    uint64_t sampled_at; /* `blocks` at the last sample */
    /* Additional blocks between two samples. It grows while the samples
     * agree. */
    _Atomic(unsigned) interval;
    _Atomic(uint64_t) costly_until_ns; /* 0: the last region was cheap */
    _Atomic(uint64_t) costly_ns;       /* length of the last pause */
};

enum thp_evidence {
    THP_NONE,
    /* Blocks of the class were touched as a whole, as far as known. This one is
     * a control. */
    THP_CONTROL,
    THP_TOUCHED,
    THP_SURE, /* enough blocks were touched to earn huge pages */
};

/* Returns the expected use of the next block of this number of pages, and
 * counts the block. The caller holds the heap's lock. */
enum thp_evidence thp_policy_expect(struct thp_policy *policy, size_t pages);

/* Returns whether the pause after a costly huge-page region still lasts. */
bool thp_policy_is_costly(const struct thp_policy *policy);

/* Notes a new large block. Returns the pages of an older block that the caller
 * is to sample, 0 bytes if there is none. The caller holds the heap's lock. */
struct iovec thp_policy_note(struct thp_policy *policy, const struct heap *heap, const struct span *span);

/* Returns whether a large block is to be sampled before it is freed. The thread
 * that owns the block may call it. */
bool thp_policy_samples_freed(struct thp_policy *policy, const struct span *span);

/* Notes how long the first touch of a new huge-page region took, and how long
 * small pages would have taken. Any thread may call it. */
void thp_policy_note_cost(struct thp_policy *policy, uint64_t ns, double small_ns);

/* Stores the page-aligned ranges of a block that are sampled. Returns the
 * number of ranges. Pure. */
#define THP_SAMPLED_RANGES 2
size_t thp_policy_sampled(const char *base, size_t bytes, size_t page_size, struct iovec *ranges);

/* Samples the residency of some pages of a block, by two system calls at most.
 * `freed` says that the program will not touch the block any more. Any thread
 * may call it, and it takes no lock. */
void thp_policy_sample(struct thp_policy *policy, const char *base, size_t bytes, size_t page_size,
                       bool freed);

#endif
