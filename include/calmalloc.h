/*
 * calmalloc's own interface. The library also provides malloc(3) and its relatives under their usual names.
 *
 * Every function is thread-safe. As with malloc, none may be called from a signal handler. The two functions
 * for debuggers are exceptions to both. Sizes are in bytes. A program that must also run without the library
 * can look these functions up by dlsym.
 */
#ifndef CALMALLOC_H
#define CALMALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALM_API __attribute__((visibility("default")))

/* The version of calmalloc that this header belongs to, of which SONAME and packages have theirs. */
#define CALM_RELEASE "0.1.0"

/*
 * malloc(3) and its relatives, under names that no other library defines: these always use calmalloc, even if
 * another allocator provides malloc. Every block is aligned to 16 bytes; one larger than eight pages, to 64.
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
/* The usable size of a block, at least the size requested; 0 for NULL. */
CALM_API size_t calm_malloc_usable_size(const void *block);

/*
 * Flushes the caches and purges: returns all but keep_bytes of the free memory to the kernel. Returns the
 * number of bytes purged; 0 if there was nothing to purge, or the kernel refused.
 */
CALM_API size_t calm_trim(size_t keep_bytes);

#define CALM_STATS_VERSION 1

/*
 * A snapshot of the allocator's memory and counters. Fields are never removed or moved. New fields are added
 * at the end, and the version is incremented. Memory is in bytes.
 */
struct calm_stats {
    uint32_t version; /* CALM_STATS_VERSION of the library */
    uint32_t size;    /* bytes of the structure that were filled */
    /* From src/api/counters.def: begin. */

    /* Memory. in_use + retained = footprint. */
    uint64_t footprint; /* pages that are, or may be, resident */
    uint64_t in_use;    /* pages that contain any part of a block, cached blocks included */
    uint64_t retained;  /* free pages of the heap that may be resident */
    uint64_t cached;    /* free blocks in the CPU caches and the depots */
    uint64_t reserved;  /* address space */
    uint64_t metadata;  /* the allocator's own data: an upper bound of what is resident */

    /* Limits. When a thread leaves the allocator, retained <= retained_limit. Pages kept in use by
     * cached blocks alone never exceed cached_limit. */
    uint64_t retained_limit; /* the limit on retained for the current footprint */
    uint64_t cached_limit;   /* the limit on pages kept by cached blocks: a constant per CPU */

    /* Counters since the start of the process; in a forked child, since the fork. */
    uint64_t dirtied;               /* memory that became free and may be resident */
    uint64_t purged;                /* memory returned to the kernel */
    uint64_t purges_limit;          /* purges because retained exceeded its limit */
    uint64_t purges_epoch;          /* purges at an epoch's end: memory was unused or is scarce */
    uint64_t purges_request;        /* purges by calm_trim, malloc_trim or calm trim */
    uint64_t purge_failures;        /* address ranges that the kernel refused to purge */
    uint64_t purge_vectored_calls;  /* calls of process_madvise to purge */
    uint64_t purge_single_calls;    /* calls of madvise to purge */
    uint64_t purge_ranges;          /* address ranges purged */
    uint64_t purge_ns;              /* CPU time spent in purges */
    uint64_t purge_wasted_ns;       /* estimated cost of purging memory that was needed again */
    uint64_t retained_saved_ns;     /* estimated CPU time saved by keeping memory that was used again */
    uint64_t retained_byte_seconds; /* retained, multiplied by the time for which it was that much */
    uint64_t limit_checks;          /* checks of the limit on retained */
    uint64_t cache_flushes;         /* times that a CPU's cache was flushed */
    uint64_t cache_misses;          /* operations on a size class that left the fast path */
    uint64_t heap_locks;            /* acquisitions of a heap's lock */
    uint64_t large_allocations;     /* allocations of runs of pages: above 32 KiB */
    uint64_t large_moves;           /* calls of realloc that moved pages */

    /* Offload mode; 0 without it. In offload mode frees are asynchronous: the limits above apply to the
     * frees that the server has processed. calm_stats and calm_trim wait until it has processed all. */
    uint64_t offload_hits;            /* requests that found a prefilled magazine or large block */
    uint64_t offload_misses;          /* requests that found no prefilled magazine or large block */
    uint64_t offload_calls;           /* requests for which a thread waited for the server */
    uint64_t offload_messages;        /* messages to the server */
    uint64_t offload_prefilled;       /* magazines and large blocks prepared before a request */
    uint64_t offload_prefill_unused;  /* prefilled magazines and large blocks that no request took */
    uint64_t offload_wakeups;         /* times that a thread woke the server */
    uint64_t offload_sleeps;          /* times that the server slept */
    uint64_t offload_unresponsive;    /* times that a thread found the server unresponsive */
    uint64_t offload_shared_switches; /* switches to shared mode: the server found no CPU for itself */
    /* From src/api/counters.def: end. */
};

/*
 * Fills at most size bytes of *stats; callers pass sizeof *stats. Returns 0, or -1 with EINVAL if stats is
 * NULL or size is too small for the first two fields.
 */
CALM_API int calm_stats(struct calm_stats *stats, size_t size);

/*
 * Writes the same fields and the options to buffer, as one JSON object. Like snprintf, it terminates the text
 * and returns its full length without the NUL. Does not allocate.
 */
CALM_API int calm_stats_json(char *buffer, size_t size);

/*
 * Sets an option by name ("memory_per_cpu", "4"), as CALM_OPTIONS=name=value,... does at the start. Returns
 * 0, or -1 with ENOENT for an unknown name, EINVAL for an invalid value, EBUSY for an option that is fixed
 * once the first block is allocated, ENOMEM if there is no memory for a profile.
 */
CALM_API int calm_set(const char *name, const char *value);

/* Writes an option's value as text. Returns its length as snprintf does, or -1 with ENOENT. */
CALM_API int calm_get(const char *name, char *buffer, size_t size);

/*
 * Writes the heap profile, as sampled so far by the option profile, to a file for pprof, whose old contents
 * are lost. Returns 0, or -1 with ENODATA if the option was never set, ENOSYS if the library was built
 * without the profile, or an error of open or write; after one of write the file is incomplete.
 */
CALM_API int calm_profile_write(const char *path);

/*
 * For debuggers, as text: what a pointer is (a block in use or free, and where; a free page; none of
 * calmalloc's), and what the heap holds, with its locks and the threads that hold them. Both may be called
 * wherever the process stands, also within malloc, in a signal handler, and in a child of fork: they take no
 * lock, make no system call, and change nothing but a buffer of their own, which they return. The next call
 * of either overwrites it: one thread at a time. Of a heap that other threads change meanwhile, the text may
 * be wrong.
 */
CALM_API const char *calm_debug_block(const void *pointer);
CALM_API const char *calm_debug_heap(void);

/* How the colors of pages are determined; one of these may be or'ed to the cache level. By default, colors
 * are taken from frame numbers if pages of one color are measured to evict each other, and otherwise
 * determined by timing. Where timing is impossible, frame numbers are used unchecked. */
#define CALM_COLORED_FRAMES 0x100U /* by frame number; needs CAP_SYS_ADMIN and no hypervisor */
#define CALM_COLORED_TIMED  0x200U /* by timing loads; takes half a second or more; x86-64 */

/*
 * Colored memory: a zeroed block of small pages, spread evenly over the sets of the data cache of the given
 * level (2 or 3), so that an array as large as the cache fits into it. The function maps a surplus of pages,
 * several times the size of the cache, keeps pages of the right colors, moves them into place, and returns
 * the others to the kernel. It is meant for few, large, long-lived blocks. Page i of a block has color
 * (c + i) modulo the number of colors; c differs from block to block. With frame numbers, a color denotes the
 * same sets in all blocks. With timing, the colors of each block are numbered in the order of discovery, so
 * the values of c of two blocks are unrelated.
 *
 * Returns NULL, with errno:
 * - EINVAL if bytes is 0, or cache is not a level from 1 to 255 with at most one of the flags above.
 * - ENOTSUP if there is no cache of that level, or the cache has one color (a way is a page), more than
 *   1,024, or a number of sets that is not a power of two (it is hashed); if timing is required, but there is
 *   no clock for it or the cache has too many colors; if frame numbers are required, but the system has none;
 *   or if pages cannot be moved (before Linux 5.7).
 * - EPERM if frame numbers are required, but the kernel hides them.
 * - EAGAIN if timing cannot determine the colors, because of other work on the CPU or because the cache
 *   differs from its description; after at most ten seconds, and ten more for each 32 MiB of the block.
 * - ENOMEM if memory is short or 1,024 blocks exist; or if all blocks together would need more than 16,384
 *   mappings, where each moved page is a mapping of its own (before Linux 6.8).
 *
 * Only calm_colored_free may free such a block.
 */
CALM_API void *calm_colored_alloc(size_t bytes, unsigned cache);
CALM_API void calm_colored_free(void *block);

#define CALM_COLORED_VERSION 1

/* How evenly a block is spread. */
struct calm_colored {
    uint32_t version; /* CALM_COLORED_VERSION of the library */
    uint32_t size;    /* bytes of the structure that were filled */
    uint32_t level;
    uint32_t colors;         /* number of page colors of the cache of that level */
    uint32_t source;         /* CALM_COLORED_FRAMES or CALM_COLORED_TIMED */
    uint32_t first_color;    /* color of page 0 */
    uint64_t pages;          /* pages of the block */
    uint64_t pages_examined; /* pages from which these were chosen */
    /* Pages whose color is not that of their position. With frame numbers: at present, after the kernel moved
     * or copied pages (compaction, fork). With timing: when the block was allocated. */
    uint64_t pages_misplaced;
    uint64_t pages_crowded; /* pages above an even share of their color, when the block was allocated */
};

/*
 * Fills at most size bytes of *colored. Returns 0, or -1 with EINVAL if colored is NULL, size is too small
 * for the first two fields, or calm_colored_alloc did not return block.
 */
CALM_API int calm_colored_stats(const void *block, struct calm_colored *colored, size_t size);

#ifdef __cplusplus
}
#endif

#endif
