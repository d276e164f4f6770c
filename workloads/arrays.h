/* Memory for the workloads on large arrays: from the allocator, or laid out by hand. Where an array starts,
 * modulo a page and modulo a huge page, determines which cache sets it uses. */
#ifndef CALMALLOC_WORKLOADS_ARRAYS_H
#define CALMALLOC_WORKLOADS_ARRAYS_H

#include <stddef.h>

enum { LINE_BYTES = 64, ALIAS_BYTES = 4096 };

/* 4 KiB aliasing is of addresses, and so is L1's choice of a set: neither is of the system's page. */
#define HUGE_PAGE_BYTES ((size_t)2 << 20)

/* One array, and the block or mapping that it lies in. */
struct array {
    void *start;
    void *block;
    size_t mapped; /* bytes of the mapping; 0 where block is malloc's */
};

/* What the kernel is asked for: nothing, or huge pages, or small ones. */
enum huge { HUGE_SYSTEM, HUGE_ON, HUGE_OFF };

/* As the allocator gives it. */
struct array array_malloc(const char *program, size_t bytes);

/* The same by posix_memalign: on a page boundary, whatever the allocator. */
struct array array_aligned(const char *program, size_t bytes);

/* Padded by hand: the starts of count arrays are spread evenly over 4 KiB, each on a cache line. Number is
 * that of this one, less than count. */
struct array array_padded(const char *program, size_t bytes, unsigned long number, unsigned long count);

/* A mapping that starts and ends on 2 MiB boundaries, so that huge pages can hold all of it. */
struct array array_mapped(const char *program, size_t bytes, enum huge huge);

void array_free(const struct array *array);

/* How many cache lines of 4 KiB the arrays start on: 1 where all of them fight for the same L1 sets. */
unsigned long distinct_starts(void *const *starts, unsigned long count);

/* Of the process's memory, what is in huge pages now. */
unsigned long huge_kib(const char *program);

#endif
