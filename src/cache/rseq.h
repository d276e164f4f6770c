/*
 * The operations on CPU caches in the mode CACHE_RSEQ: restartable sequences on
 * the cache of the CPU that runs the caller. rseq.c has the sequences for
 * several blocks, and a header for each processor those for one block. These
 * are always inline, so that the fast paths contain them, and the compiler can
 * insert a constant address of the caches.
 *
 * A sequence is a few plain instructions. It announces its descriptor (rseq_cs)
 * in the thread's rseq area, reads the CPU's number, and ends with the one
 * store that commits. If the thread is preempted, migrated or interrupted by a
 * signal between labels 1 and 2, the kernel sends it to label 4, from where the
 * sequence starts over. A sequence may jump to code outside of the labels
 * without withdrawing the descriptor, since the kernel restarts a thread only
 * if its instruction pointer is between the labels.
 *
 * A sequence reads a stack's bottom or end before its top. A thread that opens
 * a closed stack writes them in the opposite order. A sequence that finds the
 * stack open therefore finds the top that belongs to it. A sequence that finds
 * the stack closed leaves, whatever the top is. It also leaves the zeros of a
 * stack that never had room, and that another thread is about to open.
 *
 * A sequence with outputs returns its result in the flags, or in a register. It
 * does not jump to labels of C, since gcc 12 loses the output values of such an
 * asm goto.
 */
#ifndef CALM_CACHE_RSEQ_H
#define CALM_CACHE_RSEQ_H

#include "cache/stacks.h"

/* Return the number of the caller's cache, and the number of its NUMA node. */
unsigned rseq_number(const struct cpu_caches *caches);
unsigned rseq_node(const struct cpu_caches *caches);

#if HAS_SEQUENCES && defined(__x86_64__)
#include "cache/rseq_x86_64.h"
#elif HAS_SEQUENCES
#include "cache/rseq_aarch64.h"
#endif

#if HAS_SEQUENCES

/* Move up to `count` blocks from, or to, the caller's cache. Return the number
 * of blocks moved. */
size_t rseq_pop_some(const struct cpu_caches *caches, uint32_t size_class, void **blocks, uint64_t count);
size_t rseq_push_some(const struct cpu_caches *caches, uint32_t size_class, void *const *blocks,
                      uint64_t count);

#else

/* Never called, since the mode is never CACHE_RSEQ. */
#define rseq_pop(caches, size_class, popped)              false
#define rseq_push(caches, size_class, block)              false
#define rseq_pop_some(caches, size_class, blocks, count)  0
#define rseq_push_some(caches, size_class, blocks, count) 0

#endif

#endif
