/*
 * The arena: a heap with its lock, and the depots and CPU caches in front of
 * it. This file starts the arena, trims it, applies changed settings, and takes
 * it through a fork.
 *
 * Programs get blocks through blocks.h and large.h. A thread that leaves the
 * heap checks the limit on free memory (check.h). A thread that purges
 * (purger.h) first takes the ranges out of the heap's free set, and then calls
 * the kernel without the heap's lock.
 */
#ifndef CALM_ARENA_ARENA_H
#define CALM_ARENA_ARENA_H

#include "arena/state.h"

/* Address space that a heap can reach. At first the heap reserves only its
 * first segment. */
#define HEAP_SPACE_BYTES ((size_t)1 << 40)

/* The caller has filled `settings`. Returns false if there is no memory at
 * all. */
bool arena_init(struct arena *arena, const struct size_classes *classes, struct cpu_caches *caches,
                size_t address_space, bool with_depots, void (*misused)(const struct misuse_record *misuse));

/* Flushes the depots and CPU caches, and purges all but `keep_bytes` of the
 * free memory. Returns the number of bytes purged. Any thread may call it. */
size_t arena_trim(struct arena *arena, size_t keep_bytes);

/* arena_trim for the helper. It leaves the report of invalid frees to the
 * program's threads. */
size_t arena_trim_by_helper(struct arena *arena, size_t keep_bytes);

/* Makes the limit follow changed settings, and purges what exceeds it. */
void arena_refresh(struct arena *arena);

/* Returns whether the calling thread holds a lock of the arena: the purger's,
 * the heap's, a depot's or a CPU cache's. */
bool arena_is_held(const struct arena *arena);

/*
 * Purges free memory before a fork; called before arena_before_fork.
 *
 * Free memory is worth less across a fork. The fork makes each small page of it
 * cost a fault at its next use in any case, and the child holds the memory,
 * too, until the child purges it. So a purge leaves only what may stay without
 * a helper, at most once in the break-even time. In a signal handler that
 * interrupted the arena, the function does nothing.
 */
void arena_shrink_for_fork(struct arena *arena);

/* The forking thread calls these around fork. In between, no other thread is
 * inside the heap, the depots or the CPU caches. In a single-threaded process,
 * only the child calls a function: arena_start_child. */
void arena_before_fork(struct arena *arena);
void arena_after_fork(struct arena *arena, bool child);
void arena_start_child(struct arena *arena);

#endif
