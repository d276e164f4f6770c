/*
 * Colored memory: libcalmcolored, which works beside any malloc.
 *
 * Every function is thread-safe. As with malloc, none may be called from a signal handler. Sizes are in
 * bytes. A program that must also run without the library can open it by dlopen.
 */
#ifndef CALMCOLORED_H
#define CALMCOLORED_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define CALM_COLORED_API __attribute__((visibility("default")))

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
CALM_COLORED_API void *calm_colored_alloc(size_t bytes, unsigned cache);
CALM_COLORED_API void calm_colored_free(void *block);

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
CALM_COLORED_API int calm_colored_stats(const void *block, struct calm_colored *colored, size_t size);

#ifdef __cplusplus
}
#endif

#endif
