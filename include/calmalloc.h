/*
 * calmalloc's own interface. The library also provides malloc(3) and its
 * relatives under their usual names.
 *
 * Every function is thread-safe, and a signal handler may call none of them, as
 * with malloc. The two functions for debuggers are exceptions to both rules.
 * Sizes are in bytes. A program that must also run without the library can look
 * these functions up by dlsym.
 */
#ifndef CALMALLOC_H
#define CALMALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALM_API __attribute__((visibility("default")))

/* The version of calmalloc to which this header belongs. The SONAME and the
 * packages have their versions from it. */
#define CALM_RELEASE "0.1.0"

/*
 * malloc(3) and its relatives, under names that no other library defines. They
 * always use calmalloc, even if another allocator provides malloc. A block is
 * aligned to 16 bytes, and a block larger than eight pages to 64.
 */
CALM_API void *calm_malloc(size_t size) __attribute__((__malloc__, __alloc_size__(1)));
CALM_API void calm_free(void *block);
CALM_API void *calm_calloc(size_t count, size_t size) __attribute__((__malloc__, __alloc_size__(1, 2)));
CALM_API void *calm_realloc(void *block, size_t size) __attribute__((__alloc_size__(2)));
CALM_API void *calm_reallocarray(void *block, size_t count, size_t size)
    __attribute__((__alloc_size__(2, 3)));
CALM_API void *calm_aligned_alloc(size_t alignment, size_t size)
    __attribute__((__malloc__, __alloc_size__(2)));
CALM_API int calm_posix_memalign(void **block, size_t alignment, size_t size);
CALM_API void calm_free_sized(void *block, size_t size);
CALM_API void calm_free_aligned_sized(void *block, size_t alignment, size_t size);
/* Returns the usable size of a block, which is at least the requested size.
 * Returns 0 for NULL. */
CALM_API size_t calm_malloc_usable_size(const void *block);

/*
 * Flushes the caches, and purges all but keep_bytes of the free memory: the
 * kernel takes it back. Returns the number of bytes purged. The number is 0 if
 * there was nothing to purge, or if the kernel refused.
 */
CALM_API size_t calm_trim(size_t keep_bytes);

#define CALM_STATS_VERSION 1

/*
 * A snapshot of the allocator's memory and counters. Memory is in bytes. A new
 * version of the structure adds fields at the end. No version removes or moves
 * a field.
 */
struct calm_stats {
    uint32_t version; /* CALM_STATS_VERSION of the library */
    uint32_t size;    /* number of bytes that the library filled */
    /* From src/api/counters.def: begin. */

    /* Memory. in_use + dirty = footprint. */
    uint64_t footprint; /* pages that are, or may be, resident */
    uint64_t in_use;    /* pages that contain any part of a block, cached blocks included */
    uint64_t dirty;     /* free pages of the heap that may be resident */
    uint64_t cached;    /* free blocks in the CPU caches and the depots */
    uint64_t reserved;  /* address space */
    uint64_t metadata;  /* the allocator's own data: an upper bound of what is resident */

    /* Limits. When a thread leaves the allocator, dirty <= dirty_limit. Pages kept in use by cached
     * blocks alone never exceed cached_limit. */
    uint64_t dirty_limit;  /* the limit on dirty memory for the current footprint */
    uint64_t cached_limit; /* the limit on pages kept by cached blocks: a constant per CPU */

    /* Counters since the start of the process; in a forked child, since the fork. */
    uint64_t dirtied;              /* memory that became free and may be resident */
    uint64_t purged;               /* memory returned to the kernel */
    uint64_t purges_limit;         /* purges because dirty memory exceeded its limit */
    uint64_t purges_epoch;         /* purges at an epoch's end: memory was unused or is scarce */
    uint64_t purges_request;       /* purges that calm_trim, malloc_trim or another process requested */
    uint64_t purge_failures;       /* address ranges that the kernel refused to purge */
    uint64_t purge_vectored_calls; /* calls of process_madvise to purge */
    uint64_t purge_single_calls;   /* calls of madvise to purge */
    uint64_t purge_ranges;         /* address ranges purged */
    uint64_t purge_ns;             /* CPU time spent in purges */
    uint64_t purge_wasted_ns;      /* estimated cost of purging memory that was needed again */
    uint64_t dirty_saved_ns;       /* estimated CPU time saved by keeping memory that was used again */
    uint64_t dirty_byte_seconds;   /* dirty memory, multiplied by the time for which it was that much */
    uint64_t limit_checks;         /* checks of the limit on dirty memory */
    uint64_t cache_flushes;        /* times that a CPU's cache was flushed */
    uint64_t cache_misses;         /* operations on a size class that left the fast path */
    uint64_t heap_locks;           /* acquisitions of a heap's lock */
    uint64_t large_allocations;    /* allocations of runs of pages: above 32 KiB */
    uint64_t large_moves;          /* calls of realloc that moved pages */
    uint64_t heap_locks_contended; /* acquisitions of a heap's lock that had to wait for another thread */
    uint64_t cache_lock_reason;    /* why the CPU caches have locks: 0 if they have none */
    /* From src/api/counters.def: end. */
};

/*
 * Fills at most size bytes of *stats; the caller passes sizeof *stats. Returns
 * 0, or -1 with EINVAL if stats is NULL or size is too small for the first two
 * fields.
 */
CALM_API int calm_stats(struct calm_stats *stats, size_t size);

/*
 * Writes the fields of struct calm_stats and the options to buffer, as one JSON
 * object. Like snprintf, the function terminates the text, and returns the full
 * length of the text without the NUL. It does not allocate.
 */
CALM_API int calm_stats_json(char *buffer, size_t size);

/*
 * Sets an option by name ("memory_per_cpu", "4"). CALM_OPTIONS=name=value,...
 * sets options at the start. Returns 0, or -1 with an errno: ENOENT for an
 * unknown name, EINVAL for an invalid value, EBUSY for an option that is fixed
 * once the first block is allocated, ENOMEM if there is no memory for a
 * profile.
 */
CALM_API int calm_set(const char *name, const char *value);

/* Writes an option's value as text. Returns the length of the text, as snprintf
 * does, or -1 with ENOENT for an unknown name. */
CALM_API int calm_get(const char *name, char *buffer, size_t size);

/*
 * Writes the heap profile to a file for pprof, and replaces the contents of the
 * file. The profile contains what the option profile has sampled so far.
 * Returns 0, or -1 with an errno: ENODATA if the option was never set, ENOSYS
 * if the library was built without the profile, or an error of open or write.
 * After an error of write, the file is incomplete.
 */
CALM_API int calm_profile_write(const char *path);

/*
 * Functions for debuggers. calm_debug_block describes a pointer: a block in use
 * or free and its place, a free page, or no memory of calmalloc's.
 * calm_debug_heap describes the heap, with its locks and the threads that hold
 * them.
 *
 * A debugger may call both wherever the process stands, also within malloc, in
 * a signal handler, and in a child of fork. They take no lock, make no system
 * call, and change nothing but a buffer of their own, which they return. Since
 * the next call of either function overwrites this buffer, only one thread at a
 * time may call them. The text may be wrong if other threads change the heap
 * meanwhile.
 */
CALM_API const char *calm_debug_block(const void *pointer);
CALM_API const char *calm_debug_heap(void);

#ifdef __cplusplus
}
#endif

#endif
