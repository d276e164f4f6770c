/*
 * The system's policy of transparent huge pages: whether memory is backed by them on request only, or always,
 * so that committed memory may become resident. Called at the start. Reads /sys. Thread-safe; preserves
 * errno; allocates nothing.
 */
#ifndef CALM_OS_HUGE_PAGES_H
#define CALM_OS_HUGE_PAGES_H

#include <stddef.h>

/* The size, in bytes, of the pages that a fault may bring in wherever one fits; 0 if the system does that on
 * request only, or never, or does not say. */
size_t huge_pages_always_bytes(void);

/* The size of the pages that a fault brings in where they were requested; 0 if requests have no effect. */
size_t huge_pages_request_bytes(void);

#endif
