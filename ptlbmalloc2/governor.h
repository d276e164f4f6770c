/*
 * The governor: decides for all arenas together when memory is given back.
 *
 * A thread calls it from malloc and free after every so many bytes (a check), never on the fast path. A check
 * costs one trylock and a few loads. All arenas are visited (a walk) only if the sum of their recorded tops
 * exceeds the threshold, and trimmed only if the walk confirms that.
 *
 * Locks: state.busy lets one thread at a time walk and trim; a thread that finds it taken goes on with its
 * own work. Arenas are locked by trylock only, so no thread waits here with a lock held, whatever fork or
 * another thread holds. A forked child starts anew (state.h).
 */
#ifndef PTLBMALLOC2_GOVERNOR_H
#define PTLBMALLOC2_GOVERNOR_H

#include <stddef.h>

#include "activation.h"
#include "glibc_layout.h"
#include "numbers.h"

/* Starts to govern, if it may (activation.h). At most once. */
void governor_start(void);

/* The same for the first block of an arena other than the main one: proves the layout of its heap. */
struct arena *governor_first_arena_of(const void *block);

/*
 * The arena of a live block that is not mmapped; no_arena if glibc is not governed. Thread-safe. The arena
 * stays valid for ever (glibc never destroys one), the block's heap only as long as the block.
 */
static inline struct arena *governor_arena_of(const void *block) {
    if ((chunk_of_block(block)->size_flags & CHUNK_NON_MAIN_ARENA) == 0) {
        return LOAD(&governed.main_arena);
    }
    return LOAD(&governed.heaps_proved) ? heap_of(block)->arena : governor_first_arena_of(block);
}

enum check_reason {
    CHECK_ALLOCATED, /* the allowance for allocating is used up */
    CHECK_FREED,     /* the allowance for freeing is used up */
    CHECK_MERGED,    /* a free made the arena's top grow by GOVERNOR_MERGE_BYTES or more at once */
};

#define GOVERNOR_MERGE_BYTES (1UL << 20)

/*
 * Checks an arena, for a thread that has freed so many bytes, in any arena, since its last check. Returns how
 * much it may allocate (CHECK_ALLOCATED) or free before the next one: any amount if glibc is not governed,
 * and nothing as long as that is not known. Thread-safe. The caller holds no arena.
 */
size_t governor_check(struct arena *arena, enum check_reason reason, size_t freed_bytes);

/* A block of so many bytes is calloc's. For some calls in many: see thresholds_note_calloc. Thread-safe. */
void governor_note_calloc(const void *block, size_t bytes);

/* An mmapped chunk of this size is about to be freed. Thread-safe. */
void governor_note_mmapped_free(size_t chunk_bytes);

#endif
