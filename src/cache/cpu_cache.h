/*
 * The CPU caches: stacks of free blocks, which serve nearly every malloc and
 * free.
 *
 * Each (virtual) CPU has a cache, which has a bounded stack of pointers for
 * each size class. A thread pops and pushes on the CPU that runs it, in a
 * restartable sequence (rseq.h), without a lock, an atomic operation or
 * thread-local storage. The number of CPUs therefore bounds the memory in
 * caches, however many threads start and end. Restartable sequences are missing
 * with an old kernel or C library, and under valgrind, an emulator or a
 * sanitizer. Each cache then has a lock (locked.h), and the number of caches is
 * the number of CPUs that the kernel's CPU sets have room for.
 *
 * A thread that changes a cache from another CPU acquires the cache's lock and
 * closes the cache. Once rseq_restart_all returns, no thread is within a
 * sequence on it. The heap counts blocks in a cache as in use.
 *
 * Any thread may call these functions, except those that set up struct
 * cpu_caches.
 */
#ifndef CALM_CACHE_CPU_CACHE_H
#define CALM_CACHE_CPU_CACHE_H

#include "cache/stacks.h"
#include "os/cpus.h"

#define CACHE_IDLE_CHECKS 10
#define CACHE_LINE_BYTES  64
/* The bytes by which all stacks of a cache together may grow. */
#define MAX_GROWN_BYTES ((size_t)2 << 20)

/* Prepares everything but the mode. Returns false if memory is short; the mode
 * must then be CACHE_OFF. */
bool cpu_caches_init(struct cpu_caches *caches, const struct size_classes *classes, struct rseq_offsets rseq);

/* Called once, when everything that the fast paths need is ready. */
void cpu_caches_start(struct cpu_caches *caches, enum cache_mode mode);

/* Called once, after the start. The pop and the push of one block then use the
 * instance `shared`, too, which has only the fields that they read. */
void cpu_caches_share(struct cpu_caches *caches, struct cpu_caches *shared);

/* Called when the program limits its address space. Releases the addresses that
 * are reserved for CPUs that the machine cannot have. May be called any number
 * of times after the start. */
void cpu_caches_limit(struct cpu_caches *caches);

/*
 * Tells the caches whether a helper runs. A helper may flush the caches, and
 * the C library does not count it as a thread. While a helper runs, the
 * program's only thread therefore acquires the locks, too.
 *
 * `runs` is true before a helper starts. The caller is outside of all
 * operations on caches. `runs` is false in the last call of a helper. If the
 * program's only thread is within an operation then, it holds the lock until
 * the operation ends. `runs` is also false in the only thread of a forked
 * child.
 */
void cpu_caches_set_helper(struct cpu_caches *caches, bool runs);

/* Returns the maximum of blocks that all open caches can hold together, and
 * stores the maximum of their bytes. */
size_t cpu_caches_max_blocks(const struct cpu_caches *caches, size_t *bytes);

/* Returns the number of blocks in all caches, and stores their bytes. Both are
 * approximate, since other threads change the caches meanwhile. */
size_t cpu_caches_blocks(const struct cpu_caches *caches, size_t *bytes);

/* Returns the number of the cache that the caller uses at this moment. The
 * number is one of enum rseq_no_cpu, as an unsigned one, if the mode is
 * CACHE_RSEQ, but the caller has no restartable sequences
 * (api/registration.c). */
unsigned cpu_cache_number(const struct cpu_caches *caches);

/* Returns a number that differs between threads that run at the same time: that
 * of the caller's cache, or else one by its thread pointer. */
unsigned cpu_cache_place(const struct cpu_caches *caches);

/* Returns the number of the caller's NUMA node, or 0 if the kernel does not
 * report it. */
unsigned cpu_cache_node(const struct cpu_caches *caches);

/* Move up to `count` blocks from, or to, the caller's cache. Return the number
 * of blocks moved. */
size_t cpu_cache_pop_some(struct cpu_caches *caches, uint32_t size_class, void **blocks, size_t count);
size_t cpu_cache_push_some(struct cpu_caches *caches, uint32_t size_class, void *const *blocks, size_t count);

/* Returns whether a block that its owner frees is the newest in the caller's
 * cache. If so, the block was freed before. */
bool cpu_cache_is_newest(struct cpu_caches *caches, uint32_t size_class, const void *block);

/* Gives room to the stack of a class in the caller's cache. Returns whether the
 * stack had none. */
bool cpu_cache_open(struct cpu_caches *caches, uint32_t size_class);

/*
 * Note that the caller's cache had no block, or no room. cpu_cache_ran_full
 * returns true if the stack has grown (growth.h), and so has room now. To grow
 * for the first time, the stack moves, and the sequences under way are
 * restarted. A later check shrinks the stack if it did not run empty meanwhile.
 */
void cpu_cache_ran_empty(struct cpu_caches *caches, uint32_t size_class);
bool cpu_cache_ran_full(struct cpu_caches *caches, uint32_t size_class);

/*
 * The slow paths of malloc and free call these functions after the stack of a
 * class had no block, or no room.
 *
 * cpu_cache_refill is called once the stack has room. It returns the number of
 * blocks of a magazine to fetch. If
 * another thread has left a block in the cache meanwhile, it stores this block
 * in *block, and returns 0.
 *
 * cpu_cache_spill returns what the cache does with a block that its owner
 * frees. CACHE_SPILLS: a magazine of *count blocks leaves the cache; it is in
 * `blocks`, and the freed block is its last one. CACHE_OPENED: the stack only
 * just got room, and did not take the block; the blocks of its class are
 * smaller than a cache line. CACHE_HAD: the block is in the cache already, and
 * so was freed before.
 */
enum cache_spill { CACHE_KEEPS, CACHE_SPILLS, CACHE_OPENED, CACHE_HAD };

size_t cpu_cache_refill(struct cpu_caches *caches, uint32_t size_class, void **block);
enum cache_spill cpu_cache_spill(struct cpu_caches *caches, uint32_t size_class, void *block, void **blocks,
                                 size_t *count);

/* Returns the number of blocks of a magazine to or from the caller's cache: the
 * batch of the class, or half of the stack's capacity if that is larger.
 * Returns 1 without caches. */
size_t cpu_cache_magazine(const struct cpu_caches *caches, uint32_t size_class);

/*
 * Takes all blocks out of a cache, and passes them to `put`, class by class. If
 * `only_if_idle` is set, the call is a check, which flushes the cache only if
 * the last CACHE_IDLE_CHECKS checks found it unchanged. The function calls
 * `put` under the cache's lock.
 */
void cpu_cache_flush(struct cpu_caches *caches, unsigned number, bool only_if_idle, put_flushed *put,
                     void *context);

/*
 * The forking thread calls these around fork. They hold the locks of all open
 * caches, and the one under which caches are opened, except those that the fork
 * may not wait for. If another thread held the lock of a cache, it was about to
 * flush or change the cache. The cache is therefore empty in the child, and is
 * opened again.
 */
void cpu_caches_before_fork(struct cpu_caches *caches, bool waits);
void cpu_caches_after_fork(struct cpu_caches *caches, bool child);

/* Returns whether the caller holds one of the caches' locks. */
bool cpu_caches_are_held(const struct cpu_caches *caches);

#endif
