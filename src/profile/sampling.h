/*
 * The arithmetic of sampling, pure: how many bytes to allocate until the next sample, and what a sampled
 * block stands for. Called by heap_profile.c.
 *
 * Samples are a Poisson process on the allocated bytes: the gaps between them are exponentially distributed,
 * so that a block is sampled with probability 1 - exp(-size / mean), whatever the rhythm of the program. Each
 * sampled block stands for the inverse of that many. So sums over samples are unbiased, for any mix of sizes.
 */
#ifndef CALM_PROFILE_SAMPLING_H
#define CALM_PROFILE_SAMPLING_H

#include <stdint.h>

#define SAMPLE_COUNT_UNIT 1024 /* counts of blocks are kept in this part of one */

/* The same for the same arguments, so that what was added can be subtracted. */
struct sample_weight {
    uint64_t count; /* in units of 1 / SAMPLE_COUNT_UNIT */
    uint64_t bytes;
};

/* Bytes to the next sample, at least 1: exponentially distributed if random is uniform in 64 bits. */
int64_t sampling_gap(uint64_t random, uint64_t mean_bytes);

/* size and mean_bytes: at least 1. */
struct sample_weight sampling_weight(uint64_t size, uint64_t mean_bytes);

#endif
