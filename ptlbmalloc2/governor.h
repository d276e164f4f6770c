/*
 * The governor: knows every arena, decides for all of them together, and gives memory back.
 *
 * Threads come here from malloc and free after every so many bytes (a look), never on the fast path. A look
 * costs one trylock and a few loads. Only when the arenas' recorded tops add up to more than the threshold
 * are all of them visited (a walk), and only if that holds true are they trimmed.
 *
 * Locks: `busy` lets one thread at a time walk and trim; who finds it taken goes on with its own work. Arena
 * locks are only ever tried, so nobody here waits while holding anything, whatever fork or another thread
 * holds.
 *
 * fork: all state that changes lives in memory that the kernel wipes in a child (MADV_WIPEONFORK), so a child
 * of a threaded parent starts with `busy` free, no samples and its own statistics, and walks at its first
 * look.
 */
#ifndef PTLBMALLOC2_GOVERNOR_H
#define PTLBMALLOC2_GOVERNOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "options.h"

struct arena;

/* What a look lets the calling thread do before the next one. */
struct allowance {
    size_t alloc_bytes;
    size_t free_bytes;
};

/* Proves glibc and takes over trimming. False if it stays out, and then changes nothing. At most once. */
bool governor_start(const struct options *options);

/* Whether it governs now. Thread-safe. */
bool governor_is_active(void);

/* Whether governor_start has not been called yet. Thread-safe. */
bool governor_is_unborn(void);

/* What the free path may read without a call. */
extern struct governor_view {
    struct arena *_Atomic main_arena; /* where nothing is governed, an arena whose top never moves */
    _Atomic(bool) heaps_proved;       /* blocks that are not the main arena's may be looked up */
} governor_view;

/*
 * The arena that a live block, not an mmapped one, comes from. NULL: not governed. Thread-safe. The arena
 * itself stays valid for ever (glibc never destroys one), the block's heap only as long as the block.
 */
struct arena *governor_arena_of(const void *block);

enum look_reason {
    LOOK_ALLOCATED, /* the allowance for allocating is used up */
    LOOK_FREED,     /* the allowance for freeing is */
    LOOK_MERGED, /* neither, but a free made the arena's top grow by GOVERNOR_MERGE_BYTES or more at once */
};

#define GOVERNOR_MERGE_BYTES (1UL << 20)

/*
 * A thread looks at an arena; in all it has freed so many bytes since its last look. Thread-safe; to be
 * called with no arena locked.
 */
struct allowance governor_look(struct arena *arena, enum look_reason reason, size_t freed_bytes);

/* An mmapped chunk of this size is about to be freed: glibc's dynamic mmap threshold, which governing stops.
 */
void governor_note_mmapped_free(size_t chunk_bytes);

/* glibc has taken the user's or the program's threshold. */
void governor_note_mmap_threshold(size_t value);

/* From how many bytes on glibc maps a block on its own, as far as is known. Thread-safe. */
size_t governor_mmap_threshold(void);

/* A block was placed, for the statistics. Only where glibc is or was governed. Thread-safe. */
void governor_note_placed(void);

/* The user or the program sets mallopt(parameter) to a value: from now on that wins. */
void governor_note_mallopt(int parameter, size_t value);

struct governor_stats {
    bool active;
    const char *why_not;       /* constant text, where not active */
    const char *glibc_version; /* never NULL */
    double sensitivity;
    bool user_trim_threshold, user_top_pad,
        user_mmap_threshold; /* set by the user or the program: theirs win */
    uint64_t threshold_bytes, pad_each_bytes, footprint_bytes, free_top_bytes;
    uint64_t arenas, cpus_hundredths;
    uint64_t trims;          /* walks that gave something back */
    uint64_t bytes_trimmed;  /* address space cut off tops */
    uint64_t bytes_purged;   /* of it, resident before */
    uint64_t ranges;         /* purged */
    uint64_t purge_calls;    /* process_madvise and madvise */
    uint64_t vectored_calls; /* of them, process_madvise */
    uint64_t break_calls;    /* the main arena's share, by lowering the break */
    uint64_t failed_purges;
    uint64_t busy_arenas; /* left for the next trim */
    uint64_t walks, claims, bytes_claimed, threshold_changes, mmap_threshold_raises;
    uint64_t placed_blocks; /* see placement.h */
};

/* A snapshot, each figure exact, not all of one instant. Thread-safe. */
struct governor_stats governor_read_stats(void);

#endif
