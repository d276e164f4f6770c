/*
 * The caches that data passes on its way to a CPU, as the kernel or the processor describes them.
 *
 * Rare looks: files of /sys, or instructions that a hypervisor emulates. Thread-safe; preserves errno;
 * allocates nothing. Where CPUs differ, those of the first are told.
 */
#ifndef CALM_OS_CACHES_H
#define CALM_OS_CACHES_H

#include <stddef.h>

#define CACHES_MOST 4

struct os_cache {
    unsigned level; /* 1: nearest to the CPU */
    size_t bytes;
    unsigned ways;
    size_t line_bytes;
    size_t sets;
    unsigned cpus; /* that share it, at least 1 */
};

/*
 * Up to most caches, the nearest first; returns how many, 0 if nobody says. root stands for "/": for the
 * machine's own (""), the processor is asked where /sys has nothing or file_may_open says no.
 */
size_t os_caches(const char *root, struct os_cache *caches, size_t most);

/* Bytes after which addresses fall into the same sets again. */
static inline size_t os_cache_way_bytes(const struct os_cache *cache) {
    return cache->sets * cache->line_bytes;
}

#endif
