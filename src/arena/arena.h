/*
 * The arenas: heaps with their locks, and the depots and CPU caches in front of
 * them. This file starts the first arena, trims all of them, applies changed
 * settings, and takes them through a fork.
 *
 * Programs get blocks through blocks.h and large.h. A thread that leaves a heap
 * checks the limit on free memory (check.h), which holds for all arenas
 * together. A thread that purges (purger.h) first takes the ranges out of the
 * heaps' free sets, and then calls the kernel without a heap's lock.
 */
#ifndef CALM_ARENA_ARENA_H
#define CALM_ARENA_ARENA_H

#include "arena/state.h"

/* The caller has filled `settings`. Returns false if there is no memory at
 * all. */
bool arena_init(struct arenas *arenas, const struct size_classes *classes, struct cpu_caches *caches,
                size_t address_space, bool with_depots, void (*misused)(const struct misuse_record *misuse));

/* Flushes the depots and CPU caches, and purges all but `keep_bytes` of the
 * free memory. Returns the number of bytes purged. Any thread may call it. */
size_t arena_trim(struct arenas *arenas, size_t keep_bytes);

/* arena_trim for the helper. It leaves the report of invalid frees to the
 * program's threads. */
size_t arena_trim_by_helper(struct arenas *arenas, size_t keep_bytes);

/* Adapts to a new limit on the program's address space, in bytes
 * (space_limit). No further arena starts, except one for what the others have no
 * room for. Any thread may call it. */
void arena_limit_space(struct arenas *arenas, size_t bytes);

/* Makes the limit follow changed settings, and purges what exceeds it. */
void arena_refresh(struct arenas *arenas);

/* Returns whether the calling thread holds a lock of the arenas: the purger's, a
 * heap's, a depot's or a CPU cache's, or the one for the start of an arena. */
bool arena_is_held(const struct arenas *arenas);

/*
 * Purges free memory before a fork; called before arena_before_fork.
 *
 * Free memory is worth less across a fork. The fork makes each small page of it
 * cost a fault at its next use in any case, and the child holds the memory,
 * too, until the child purges it. So a purge leaves at most
 * RETENTION_FOREGROUND_BYTES, at most once in the break-even time. If no more is
 * free, the function writes nothing, since a fork makes the kernel copy each
 * page that is written around it. In a signal handler that
 * interrupted the arena, the function does nothing.
 */
void arena_shrink_for_fork(struct arenas *arenas);

/* The forking thread calls these around fork. In between, no other thread is
 * inside the heap, the depots or the CPU caches. In a single-threaded process,
 * only the child calls a function: arena_start_child. */
void arena_before_fork(struct arenas *arenas);
void arena_after_fork(struct arenas *arenas, bool child);
void arena_start_child(struct arenas *arenas);

#endif
