/*
 * The arithmetic of sampling, pure: which byte of all that are allocated is the next to be looked at, and
 * what a block that was hit stands for.
 *
 * Samples are a Poisson process on the bytes: the gaps between them are exponentially distributed, so a block
 * is hit with probability 1 - exp(-size / mean), wherever it lies in the program's rhythm; and one that is
 * hit stands for the inverse of that many. Sums over what was hit then are right on average, of any mix of
 * sizes.
 */
#ifndef CALM_PROFILE_SAMPLING_H
#define CALM_PROFILE_SAMPLING_H

#include "os/mix.h"

#include <stdint.h>

#define SAMPLE_COUNT_UNIT 1024 /* counts of blocks are kept in this part of one */

/* What one block stands for. The same for the same arguments, so that what was added can be taken off. */
struct sample_weight {
    uint64_t count; /* of SAMPLE_COUNT_UNIT */
    uint64_t bytes;
};

/* Bytes to the next sample, at least 1: exponentially distributed if random is uniform in 64 bits. */
int64_t sampling_gap(uint64_t random, uint64_t mean_bytes);

/* size and mean_bytes: at least 1. */
struct sample_weight sampling_weight(uint64_t size, uint64_t mean_bytes);

/* One number after another that looks random, of a counter that each caller moves on by one step. */
#define SAMPLING_STEP OS_MIX_STEP
static inline uint64_t sampling_mix(uint64_t counter) {
    return os_mixed(counter);
}

#endif
