/*
 * The caches that data passes on its way to a CPU, as the kernel or the processor describes them. Called by
 * the code that places large blocks.
 *
 * Slow: reads files of /sys, or executes instructions that a hypervisor emulates. Thread-safe; preserves
 * errno; allocates nothing. Where CPUs differ, this describes those of the first.
 */
#ifndef CALM_OS_HARDWARE_CACHES_H
#define CALM_OS_HARDWARE_CACHES_H

#include <stddef.h>

#define MAX_HARDWARE_CACHES 4

struct hardware_cache {
    unsigned level; /* 1: nearest to the CPU */
    size_t bytes;
    unsigned ways;
    size_t line_bytes;
    size_t sets;
    unsigned cpus; /* that share it, at least 1 */
};

/*
 * Up to max caches, the nearest first; returns their number, 0 if none is known. root stands for "/": for the
 * machine's own (""), the processor is asked where /sys has nothing or no file may be opened.
 */
size_t hardware_caches_read(const char *root, struct hardware_cache *caches, size_t max);

/* The number of bytes after which addresses fall into the same sets again. */
static inline size_t hardware_cache_way_bytes(const struct hardware_cache *cache) {
    return cache->sets * cache->line_bytes;
}

#endif
