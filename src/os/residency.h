/*
 * How much of a range of memory is resident, so that purges can be cut into slices of known cost. Called by
 * the governors of both allocators. Thread-safe; preserves errno; allocates nothing; causes no shootdown.
 */
#ifndef CALM_OS_RESIDENCY_H
#define CALM_OS_RESIDENCY_H

#include <stdbool.h>
#include <stddef.h>

#define RESIDENCY_CHUNK_PAGES 4096 /* examined by one system call */

struct residency {
    size_t suffix_bytes;   /* the longest tail of the range with at most the wanted resident bytes */
    size_t resident_bytes; /* resident in that tail */
};

/*
 * Examines the page-aligned range [start, start + bytes) from its end and stops once the tail holds
 * max_resident_bytes. Where the kernel does not say, every page counts as resident. `scratch` is
 * RESIDENCY_CHUNK_PAGES bytes of the caller's.
 */
struct residency residency_of_tail(const void *start, size_t bytes, size_t max_resident_bytes,
                                   unsigned char *scratch);

/* The first stretch of resident pages in a page-aligned range of at most RESIDENCY_CHUNK_PAGES pages: its
 * bytes, 0 if there is none or the kernel does not say, and where it begins. scratch: as above. */
size_t residency_first(const void *start, size_t bytes, unsigned char *scratch, size_t *offset);

#define RESIDENCY_SAMPLE_BYTES ((size_t)256 << 10)

/* Whether all pages of a page-aligned range of at most RESIDENCY_SAMPLE_BYTES are resident; false where the
 * kernel does not say. */
bool residency_is_full(const void *start, size_t bytes);

#endif
