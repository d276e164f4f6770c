/*
 * The arithmetic of sampling: how many bytes to allocate until the next sample,
 * and how many blocks and bytes a sampled block stands for. Pure. Called by
 * heap_profile.c.
 *
 * Samples are a Poisson process on the allocated bytes: the gaps between them
 * are exponentially distributed. A block is therefore sampled with probability
 * 1 - exp(-size / mean), whatever the rhythm of the program. Each sampled block
 * stands for the inverse of this probability. Sums over samples are therefore
 * unbiased for any mix of sizes.
 */
#ifndef CALM_PROFILE_SAMPLING_H
#define CALM_PROFILE_SAMPLING_H

#include <stdint.h>

#define SAMPLE_COUNT_UNIT 1024 /* the count of one block */

/* How much a sampled block stands for. The weight is equal for equal arguments,
 * so that a weight that was added can be subtracted. */
struct sample_weight {
    uint64_t count; /* in units of 1 / SAMPLE_COUNT_UNIT */
    uint64_t bytes;
};

/* Returns the bytes to the next sample, at least 1. They are exponentially
 * distributed if `random` is uniform in 64 bits. */
int64_t sampling_gap(uint64_t random, uint64_t mean_bytes);

/* Returns the weight of a block. `size` and `mean_bytes` are at least 1. */
struct sample_weight sampling_weight(uint64_t size, uint64_t mean_bytes);

#endif
