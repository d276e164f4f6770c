/*
 * Global hysteresis: the threshold of free memory, for the whole process, above
 * which an allocator gives memory back.
 *
 * Pure: numbers in, thresholds out; no system call, no lock, no global. Any
 * thread and any signal handler may call these functions. The arenas of both
 * allocators call them, and so do the tests and the programs that predict the
 * allocators.
 *
 * Source: Schildermans et al., "Ptlbmalloc2", sections 5.1 and 6.2.1, table 1.
 * One kB is 1000 bytes. A footprint on the edge between two rows of the table
 * belongs to the row of the larger footprint.
 */
#ifndef CALM_POLICY_HYSTERESIS_H
#define CALM_POLICY_HYSTERESIS_H

#include <stddef.h>
#include <stdint.h>

struct hysteresis_input {
    size_t footprint_bytes; /* held from the system by all arenas, free or not */
    double cpus_used;       /* average over the last second; below zero or not a number counts as zero */
    size_t arenas;          /* zero counts as one */
    double sensitivity;     /* multiplies the threshold; zero, less than zero or not a number counts as 1 */
};

struct hysteresis_thresholds {
    size_t trim_bytes;     /* memory is given back once the free top space of the process exceeds this */
    size_t pad_each_bytes; /* padding that each arena keeps: its share of a quarter of trim_bytes */
};

/* Returns the threshold of table 1 for a footprint, in bytes, before any
 * factor. Never fails. */
static inline size_t hysteresis_base_bytes(size_t footprint_bytes) {
    if (footprint_bytes < 500000) {
        return 100000;
    }
    if (footprint_bytes < 1000000) {
        return footprint_bytes / 2;
    }
    if (footprint_bytes < 1000000000) {
        return footprint_bytes / 10 + 400000;
    }
    return 100000000;
}

/* Returns the threshold of table 1 times a factor, in bytes. Saturates at
 * PTRDIFF_MAX. Never fails. */
static inline size_t hysteresis_threshold_bytes(size_t footprint_bytes, double factor) {
    double bytes = (double)hysteresis_base_bytes(footprint_bytes) * factor;
    return bytes < (double)PTRDIFF_MAX ? (size_t)bytes : (size_t)PTRDIFF_MAX;
}

/* Returns the factor (1 + CPUs / 100) * sensitivity, which is above zero. Never
 * fails. */
static inline double hysteresis_factor(double cpus_used, double sensitivity) {
    /* The comparisons are written so that a NaN takes the default. */
    double cpus = cpus_used > 0 ? cpus_used : 0;
    return (1 + cpus / 100) * (sensitivity > 0 ? sensitivity : 1);
}

/* Returns the thresholds of section 6.2.1. Never fails. */
static inline struct hysteresis_thresholds hysteresis_decide(struct hysteresis_input in) {
    double factor = hysteresis_factor(in.cpus_used, in.sensitivity);
    size_t trim = hysteresis_threshold_bytes(in.footprint_bytes, factor);
    return (struct hysteresis_thresholds){trim, trim / 4 / (in.arenas > 0 ? in.arenas : 1)};
}

#endif
