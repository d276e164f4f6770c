/*
 * The caches between memory and a CPU, as the kernel or the processor describes
 * them. The placement of large blocks calls this file.
 *
 * The calls are slow, since they read files of /sys, or execute instructions
 * that a hypervisor emulates. They are thread-safe, preserve errno, and
 * allocate nothing. If CPUs differ, the result describes the caches of the
 * first CPU.
 */
#ifndef CALM_OS_HARDWARE_CACHES_H
#define CALM_OS_HARDWARE_CACHES_H

#include <stddef.h>

#define MAX_HARDWARE_CACHES 4

struct hardware_cache {
    unsigned level; /* 1 is the nearest to the CPU */
    size_t bytes;
    unsigned ways;
    size_t line_bytes;
    size_t sets;
    unsigned cpus; /* the number of CPUs that share it, at least 1 */
};

/* Stores up to `max` caches, the nearest to the CPU first. Returns their
 * number, or 0 if none is known. `root` stands for "/". For the machine's own
 * root (""), asks the processor if /sys has nothing or if no file may be
 * opened. */
size_t hardware_caches_read(const char *root, struct hardware_cache *caches, size_t max);

/* Returns the number of bytes after which addresses fall into the same sets
 * again. */
static inline size_t hardware_cache_way_bytes(const struct hardware_cache *cache) {
    return cache->sets * cache->line_bytes;
}

#endif
