/* How much of a range of memory is resident, so that work on it can be cut into slices of known cost. */
#ifndef CALM_OS_RESIDENCY_H
#define CALM_OS_RESIDENCY_H

#include <stdbool.h>
#include <stddef.h>

#define RESIDENCY_WINDOW_PAGES 4096 /* looked at in one system call */

struct residency {
    size_t suffix_bytes;   /* the longest tail of the range with at most the wanted resident bytes */
    size_t resident_bytes; /* resident in that tail */
};

/*
 * Looks from the end of the page-aligned range [start, start + bytes) downwards and stops once the tail holds
 * max_resident_bytes. Where the kernel does not say, every page counts as resident. `scratch` is
 * RESIDENCY_WINDOW_PAGES bytes of the caller's. Thread-safe; preserves errno; allocates nothing. Causes no
 * shootdown.
 */
struct residency residency_of_tail(const void *start, size_t bytes, size_t page_bytes,
                                   size_t max_resident_bytes, unsigned char *scratch);

#define RESIDENCY_SAMPLE_BYTES ((size_t)256 << 10)

/* Whether all pages of a page-aligned range of at most RESIDENCY_SAMPLE_BYTES are resident; false where the
 * kernel does not say. The same holds. */
bool residency_is_full(const void *start, size_t bytes, size_t page_bytes);

#endif
