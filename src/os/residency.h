/*
 * How much of a range of memory is resident, so that a purge can be cut into
 * slices of known cost. The arenas of both allocators call this file.
 *
 * The functions are thread-safe, preserve errno, allocate nothing, and cause no
 * shootdown.
 */
#ifndef CALM_OS_RESIDENCY_H
#define CALM_OS_RESIDENCY_H

#include <stdbool.h>
#include <stddef.h>

#define RESIDENCY_CHUNK_PAGES 4096 /* examined by one system call */

struct residency {
    size_t suffix_bytes;   /* length of the longest tail with at most max_resident_bytes resident */
    size_t resident_bytes; /* the resident bytes of that tail */
};

/* Examines the page-aligned range [start, start + bytes) from its end, and
 * stops once the tail holds max_resident_bytes. If the kernel does not tell,
 * every page counts as resident. `scratch` is RESIDENCY_CHUNK_PAGES bytes of the
 * caller's. */
struct residency residency_of_tail(const void *start, size_t bytes, size_t max_resident_bytes,
                                   unsigned char *scratch);

/* Finds the first stretch of resident pages in a page-aligned range of at most
 * RESIDENCY_CHUNK_PAGES pages. Returns its number of bytes and stores where it
 * begins. Returns 0 if there is none, or if the kernel does not tell. `scratch`
 * is RESIDENCY_CHUNK_PAGES bytes of the caller's. */
size_t residency_first(const void *start, size_t bytes, unsigned char *scratch, size_t *offset);

#define RESIDENCY_SAMPLE_BYTES ((size_t)256 << 10)

/* Returns whether all pages of a page-aligned range of at most
 * RESIDENCY_SAMPLE_BYTES are resident. Returns false if the kernel does not
 * tell. */
bool residency_is_full(const void *start, size_t bytes);

#endif
