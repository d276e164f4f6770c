/*
 * A profile as a file for pprof (profile.proto, uncompressed), put together in a small buffer and written by
 * plain system calls.
 */
#ifndef CALM_PROFILE_PPROF_H
#define CALM_PROFILE_PPROF_H

#include "profile/samples.h"

#include <stdint.h>

/*
 * Makes, or replaces, the file. Returns 0 or an errno. Any thread, while others sample; takes the loader's
 * lock for a moment, so not from within malloc. Allocates nothing.
 */
int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path);

#endif
