/*
 * calmalloc's own interface, beside malloc(3) and its kin, which the library provides under their usual
 * names.
 *
 * Every function is thread-safe. None may be called from a signal handler, as with malloc. Sizes are in
 * bytes. A program that may run without the library can reach these by dlsym.
 */
#ifndef CALMALLOC_H
#define CALMALLOC_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALM_API __attribute__((visibility("default")))

/*
 * malloc(3) and its kin by names that nothing else defines: always calmalloc's, whoever owns malloc. Every
 * block is aligned to 16 bytes, and one larger than eight pages to 64.
 */
CALM_API void *calm_malloc(size_t size) __attribute__((malloc, alloc_size(1)));
CALM_API void calm_free(void *block);
CALM_API void *calm_calloc(size_t count, size_t size) __attribute__((malloc, alloc_size(1, 2)));
CALM_API void *calm_realloc(void *block, size_t size) __attribute__((alloc_size(2)));
CALM_API void *calm_reallocarray(void *block, size_t count, size_t size) __attribute__((alloc_size(2, 3)));
CALM_API void *calm_aligned_alloc(size_t alignment, size_t size) __attribute__((malloc, alloc_size(2)));
CALM_API int calm_posix_memalign(void **block, size_t alignment, size_t size);
CALM_API void calm_free_sized(void *block, size_t size);
CALM_API void calm_free_aligned_sized(void *block, size_t alignment, size_t size);
/* Bytes that may be used at block, at least what was asked for; 0 for NULL. */
CALM_API size_t calm_malloc_usable_size(const void *block);

/*
 * Gives back to the system all but keep_bytes of the free memory, cached blocks included, now. Returns the
 * bytes given back; 0 if there was nothing, or the kernel refused.
 */
CALM_API size_t calm_trim(size_t keep_bytes);

#define CALM_STATS_VERSION 2

/*
 * What the allocator holds and has done, one moment's view. A field is never removed or moved; new ones are
 * added at the end, and the version counts up. Memory is in bytes.
 */
struct calm_stats {
    uint32_t version; /* CALM_STATS_VERSION of the library */
    uint32_t size;    /* bytes of the structure that were filled */

    /* Memory. in_use + retained = footprint. */
    uint64_t
        footprint; /* pages that hold, or held, something, and were not given back: what policy goes by */
    uint64_t
        in_use; /* pages with at least one byte that is not free (blocks in caches count as not free here) */
    uint64_t
        retained;    /* free pages that may be resident: the heap's, whole spans or within part-used slabs */
    uint64_t cached; /* bytes of free blocks in the caches of CPUs and in the depot */
    uint64_t reserved; /* address space */
    uint64_t metadata; /* of the allocator's own, resident at most */

    /* The policy's bounds. At every moment retained <= retained_limit once a thread has left the allocator,
     * and pages kept alive by cached blocks alone are at most cached_limit. */
    uint64_t retained_limit; /* for the current footprint */
    uint64_t cached_limit;   /* a constant for each CPU */

    /* Counters since the start of the process. */
    uint64_t dirtied;              /* bytes that became free, and may be resident */
    uint64_t purged;               /* bytes given back */
    uint64_t purges;               /* because retained exceeded its limit */
    uint64_t purges_timed;         /* because time passed: at most two in a window */
    uint64_t purges_asked;         /* by calm_trim and malloc_trim */
    uint64_t purge_failures;       /* ranges that the kernel refused */
    uint64_t purge_vectored_calls; /* process_madvise */
    uint64_t purge_single_calls;   /* madvise */
    uint64_t purge_ranges;
    uint64_t cache_drains;      /* of a CPU's cache by another CPU's thread */
    uint64_t cache_misses;      /* operations that left the fast path for a size class */
    uint64_t heap_locks;        /* acquisitions of a heap's lock */
    uint64_t large_allocations; /* of runs of pages, slabs excluded */
    uint64_t large_moves;       /* realloc by moving pages */
    /* Offload mode; 0 without it. There, frees are asynchronous: what is said of bounds above holds of all
     * that the server has seen, which calm_stats and calm_trim wait for. */
    uint64_t offload_hits;    /* magazines and large blocks that were ready when a thread wanted one */
    uint64_t offload_misses;  /* that were not */
    uint64_t offload_calls;   /* that a thread waited for an answer of the server */
    uint64_t offload_records; /* messages to the server */
    uint64_t offload_stocked; /* magazines and large blocks made ready ahead */
    uint64_t offload_unused;  /* of those: that nobody wanted, and went back */
    uint64_t offload_wakes;   /* of the server, by threads */
    uint64_t offload_naps;    /* of the server */
    uint64_t offload_lost;    /* times that a thread found the server not to answer */
    uint64_t offload_lent; /* times that the server had no CPU to itself, and lent the heap to the threads */
    /* From version 2 on. */
    uint64_t purge_vain_ns; /* what giving back cost where memory was wanted again, with the faults, about */
};

/*
 * Fills *stats, of which the caller knows size bytes (sizeof *stats). Returns 0; -1 and EINVAL if stats is
 * NULL or size is too small for version and size.
 */
CALM_API int calm_stats(struct calm_stats *stats, size_t size);

/*
 * The same, and the options, as one JSON object, NUL-terminated, in buffer. Returns the length it has, or
 * would have, without the NUL, as snprintf does. Allocates nothing.
 */
CALM_API int calm_stats_json(char *buffer, size_t size);

/*
 * Sets an option by name ("policy", "adaptive"), as CALM_OPTIONS=name=value,... does at the start. Returns 0;
 * -1 and ENOENT for an unknown name, EINVAL for a value it cannot take, EBUSY for an option that is fixed
 * once the first block is allocated.
 */
CALM_API int calm_set(const char *name, const char *value);

/* The value of an option as text. Returns its length as snprintf does; -1 and ENOENT for an unknown name. */
CALM_API int calm_get(const char *name, char *buffer, size_t size);

/*
 * Writes the heap profile so far, of what option profile samples, to a file for pprof. Returns 0; -1 and
 * errno: ENODATA if the option was never set, else as open and write say.
 */
CALM_API int calm_profile_write(const char *path);

/* How the color of a page is found out; one of them may be or'ed to the cache level. By default frames are
 * read, and believed if pages of one color do fight for the cache; else it is timed. Where nothing can be
 * timed, frames are believed as they are. */
#define CALM_COLORED_FRAMES 0x100U /* by its frame's number; needs CAP_SYS_ADMIN; no hypervisor */
#define CALM_COLORED_TIMED  0x200U /* by the time that loads take; half a second or more; x86-64 */

/*
 * Colored memory: a zeroed block of small pages that are spread evenly over the sets of the data cache of a
 * level (2, 3), so that an array as large as the cache fits into it. Of the pages that the system gives at
 * random a surplus is had, as large as some times the cache, those of the right colors are kept and moved to
 * their places, and the others given back: for few, large, long-lived blocks. Page i of a block has color
 * (c + i) modulo the number of colors, and c differs from block to block. By frames, a color is the same sets
 * in all blocks; by time, each block's colors are numbered as they were found, and c says nothing of where it
 * begins beside another.
 *
 * Returns NULL, with errno:
 * - EINVAL if bytes is 0, or cache is no level from 1 to 255 with at most one of the above.
 * - ENOTSUP if there is no cache of that level, it has one color (a way is a page), more than 1,024, or sets
 *   that are no power of two (it is hashed); if it is to be timed, and there is no clock for that or it has
 *   too many colors; if only frames would do, and the system has none to read; if pages cannot be moved
 *   (before Linux 5.7).
 * - EPERM if only frames would do, and the kernel hides them.
 * - EAGAIN if colors cannot be told by time, because of other work on the CPU or because the cache is another
 *   than it says; at the latest after ten seconds, and ten more for each 32 MiB of the block.
 * - ENOMEM if memory is short, or there are 1,024 blocks; or, where each page that is moved is a mapping of
 *   its own (before Linux 6.8), if all blocks together would have more than 16,384 of these.
 *
 * Such blocks are calm_colored_free's alone.
 */
CALM_API void *calm_colored_alloc(size_t bytes, unsigned cache);
CALM_API void calm_colored_free(void *block);

#define CALM_COLORED_VERSION 1

/* How even a block came out. */
struct calm_colored {
    uint32_t version; /* CALM_COLORED_VERSION of the library */
    uint32_t size;    /* bytes of the structure that were filled */
    uint32_t level;
    uint32_t colors;         /* of pages, in the cache of that level */
    uint32_t source;         /* CALM_COLORED_FRAMES or CALM_COLORED_TIMED */
    uint32_t first_color;    /* of page 0 */
    uint64_t pages;          /* of the block */
    uint64_t pages_examined; /* of which they were chosen */
    /* Pages that have not the color of their place. By frames: now, after whatever the kernel has moved or
     * copied since (compaction, fork); by time: when the block was allocated. */
    uint64_t pages_misplaced;
    uint64_t pages_crowded; /* beyond an even share of their color, when the block was allocated */
};

/*
 * Fills *colored, of which the caller knows size bytes. Returns 0; -1 and EINVAL if colored is NULL, size is
 * too small for version and size, or block is none of calm_colored_alloc's.
 */
CALM_API int calm_colored_stats(const void *block, struct calm_colored *colored, size_t size);

#ifdef __cplusplus
}
#endif

#endif
