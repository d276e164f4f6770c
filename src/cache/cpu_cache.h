/*
 * The CPU caches: stacks of free blocks, from which nearly every malloc and free is served.
 *
 * Each (virtual) CPU has a cache: for each size class a bounded stack of pointers. A thread pops and pushes
 * on the CPU that runs it, in a restartable sequence (rseq.h), without a lock, an atomic operation or
 * thread-local storage. So the memory in caches is bounded by CPUs, however many threads come and go. Without
 * restartable sequences (an old kernel or C library, valgrind, an emulator, a sanitizer) each cache has a
 * lock, and a thread uses the cache that its thread pointer hashes to, of as many as the kernel's sets of
 * CPUs have room for.
 *
 * To change a cache from elsewhere, a thread takes the cache's lock and closes it; once rseq_restart_all
 * returns no thread is within a sequence on it. Blocks in a cache are in use to the heap.
 *
 * Any thread may call these functions, except those that set up struct cpu_caches.
 */
#ifndef CALM_CACHE_CPU_CACHE_H
#define CALM_CACHE_CPU_CACHE_H

#include "cache/stacks.h"
#include "os/cpus.h"

#define CACHE_IDLE_CHECKS 10
/* By which all stacks of a cache together may grow. */
#define MAX_GROWN_BYTES ((size_t)2 << 20)

/* Prepares everything but the mode. False if memory is short: then the mode must be CACHE_OFF. */
bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes, struct rseq_offsets rseq);

/* Once, when everything that the fast paths need is ready. may_be_alone: no server thread will use the
 * caches, of which the C library does not know; so a lone thread of the program may omit locks. */
void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode, bool may_be_alone);

/* Once, after that: pop and push of one block may go by the other instance, too, which has no more than they
 * read. */
void cpu_caches_share(struct cpu_caches *caches, struct cpu_caches *shared);

/* The program limits its address space: releases what is reserved for CPUs that the machine cannot have. At
 * any time after the start, any number of times. */
void cpu_caches_limit(struct cpu_caches *caches);

/*
 * Before a helper starts, which may flush caches and of which the C library does not know: from now on a lone
 * thread takes the locks, too. Called outside all operations on caches, hence a lone thread is not within
 * one. false: by the helper as its last act, since a lone thread within an operation holds the lock until
 * that ends; or by the only thread of a forked child.
 */
void cpu_caches_set_helper(struct cpu_caches *caches, bool runs);

/* The most blocks that all open caches can hold together, and the most bytes of blocks. */
size_t cpu_caches_max_blocks(const struct cpu_caches *caches, size_t *bytes);

/* Blocks in all caches, and their bytes, approximately: no thread is stopped. */
size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes);

/* The number of the cache that is the caller's at this moment; caches->count or more if it has no restartable
 * sequences while others do (see api/registration.c). */
unsigned cpu_cache_number(const struct cpu_caches *caches);

/* The number of the caller's NUMA node; 0 if the kernel does not say. */
unsigned cpu_cache_node(const struct cpu_caches *caches);

/* Moves up to count blocks from, or to, the caller's cache. Return how many. */
size_t cpu_cache_pop_some(struct cpu_caches *caches, uint32_t class, void **blocks, size_t count);
size_t cpu_cache_push_some(struct cpu_caches *caches, uint32_t class, void *const *blocks, size_t count);

/* Whether a block that its owner frees is the newest in the caller's cache: then it was freed before. */
bool cpu_cache_is_newest(struct cpu_caches *caches, uint32_t class, const void *block);

/* Gives room to a class's stack in the caller's cache. True if it had none. */
bool cpu_cache_open(struct cpu_caches *caches, uint32_t class);

/* The caller's cache had no block, or no room. cpu_cache_ran_full: true if it has room now, by growth
 * (growth.h), which at first moves it, and restarts the sequences under way; a check that finds that it did
 * not run empty shrinks it. */
void cpu_cache_ran_empty(struct cpu_caches *caches, uint32_t class);
bool cpu_cache_ran_full(struct cpu_caches *caches, uint32_t class);

/* Blocks to move at once from or to the caller's cache: the class's batch, or half of the stack's
 * capacity if that is more; 1 without caches. */
size_t cpu_cache_magazine(const struct cpu_caches *caches, uint32_t class);

/*
 * Takes all blocks out of a cache, whichever CPU's it is, and passes them to put, class by class.
 * only_if_idle: a check, which does so only if the last CACHE_IDLE_CHECKS checks found the cache unchanged.
 * Any thread; put is called with the cache's lock held.
 */
void cpu_cache_flush(struct cpu_caches *caches, unsigned number, bool only_if_idle, put_flushed *put,
                     void *context);

/*
 * Around fork: holds the locks of all open caches, except those that the fork may not wait for. A cache whose
 * lock another thread held is empty in the child, and opened anew: the other thread was about to open, flush
 * or change it.
 */
void cpu_caches_before_fork(struct cpu_caches *caches, bool waits);
void cpu_caches_after_fork(struct cpu_caches *caches, bool child);

/* Whether the caller holds a cache's lock. */
bool cpu_caches_are_held(const struct cpu_caches *caches);

#endif
