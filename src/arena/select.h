/*
 * Which arena a thread uses, and which one a block belongs to.
 *
 * A program begins with one arena. When threads wait for each other's locks, the
 * number of arenas doubles, up to the number of CPUs that the process uses. An
 * arena starts when the first thread is sent to it. A thread is sent by the
 * number of its virtual CPU, and by its node if the machine has several. A
 * thread without restartable sequences is sent by its thread pointer.
 *
 * A block always belongs to the arena whose heap contains it, whatever thread
 * frees it. If an arena has no free memory, and the others together have as much
 * as a purge would leave, a thread takes from one of them, so that the process
 * does not grow. An arena that holds little may grow (takes_from_others).
 */
#ifndef CALM_ARENA_SELECT_H
#define CALM_ARENA_SELECT_H

#include "arena/state.h"
#include "base/assert.h"

/* Returns the arena whose heap contains the address. Returns the first arena if
 * none does. Any thread. */
static inline struct arena *arena_of(const struct arenas *arenas, const void *pointer) {
    unsigned number = arenas->map.parts == 0 ? 0 : page_map_part(&arenas->map, pointer);
    return (struct arena *)&arenas->of[arena_is_ready(arenas, number) ? number : 0];
}

static inline struct heap *heap_of(const struct arenas *arenas, const void *pointer) {
    return &arena_of(arenas, pointer)->heap;
}

/* Returns whether there is only one arena. */
static inline bool arena_is_alone(const struct arenas *arenas) {
    return atomic_load_explicit(&arenas->started, memory_order_relaxed) <= 1;
}

/* Returns the NUMA node that an arena serves. */
static inline unsigned arena_node(const struct arenas *arenas, const struct arena *arena) {
    return (unsigned)(arena - arenas->of) % arenas->nodes;
}

/* Acquires the lock of an arena's heap, and counts. All work on a heap happens
 * between heap_lock and a release of the lock. heap_unlock releases it without a
 * check of the limit (check.h). */
static inline void heap_lock(struct arena *arena) {
    lock_check_rank(&arena->lock);
    if (__builtin_expect(!lock_try(&arena->lock), 0)) {
        lock_acquire_contended(&arena->lock);
        uint64_t contended = atomic_load_explicit(&arena->contended, memory_order_relaxed);
        atomic_store_explicit(&arena->contended, contended + 1, memory_order_relaxed);
    }
    uint64_t locks = atomic_load_explicit(&arena->heap_locks, memory_order_relaxed);
    atomic_store_explicit(&arena->heap_locks, locks + 1, memory_order_relaxed);
}

static inline void heap_unlock(struct arena *arena) {
    calm_assert(lock_is_mine(&arena->lock));
    lock_release(&arena->lock);
}

static inline void arena_prepare(struct arena *arena) {
    lock_set_rank(&arena->lock, LOCK_HEAP);
}

/* Moves the blocks that belong to the last block's arena to the end, in their
 * order. Returns their number. There are at most MAX_MAGAZINE_BLOCKS blocks. */
size_t arena_gather(const struct arenas *arenas, void **blocks, size_t count);

/* Returns the arena that the calling thread is sent to. */
struct arena *arena_own(struct arenas *arenas);

/* Returns a number below `count`, by which threads that run at once are to write
 * to different words: that of the CPU, if there are several arenas. */
unsigned arena_slot(const struct arenas *arenas, unsigned count);

/* Returns whether threads waited for the arena's lock so often lately that the
 * process should use more arenas. If so, begins to count anew. The caller holds
 * the heap's lock. */
bool arena_is_crowded(struct arena *arena);

/* Doubles the number of arenas in use, unless it has reached its maximum. Any
 * thread may call it. */
void arena_grow(struct arenas *arenas);

/* Returns the smallest power of two that is not below the number. */
unsigned arena_power_above(unsigned number);

/* Returns the largest number of arenas that are worth their memory if the
 * process uses this number of CPUs. */
unsigned arena_max_for(double cpus);

/* Sets the largest number of arenas by the CPUs that the process uses. The
 * caller holds the purger's lock. */
void arena_set_max(struct arenas *arenas, double cpus);

/*
 * Returns an arena other than `arena` that may have this many dirty pages in one
 * run, or a slab of the class with a free block. Class 0 has no slabs. Returns
 * NULL if no arena is likely to. The answer is a guess, since the caller does
 * not hold the other arenas' locks.
 */
struct arena *arena_with(const struct arenas *arenas, const struct arena *arena, size_t pages,
                         uint32_t size_class);

/* Called if an arena has no memory left. Returns an arena to try next, from
 * *number on, and stores where to continue. The last one returned is the arena
 * for what the parts have no room for. Returns NULL if all were tried. */
struct arena *arena_instead(struct arenas *arenas, const struct arena *arena, unsigned *number);

/* Starts an arena. Returns whether it can be used. Any thread may call it, and
 * waits for nothing. */
bool arena_start(struct arenas *arenas, unsigned number);

#endif
