/*
 * A profile as a file for pprof (profile.proto, uncompressed), put together in a small buffer and written by
 * plain system calls.
 */
#ifndef CALM_PROFILE_PPROF_H
#define CALM_PROFILE_PPROF_H

#include "profile/samples.h"

#include <stdbool.h>
#include <stdint.h>

/*
 * Writes to the file, or makes it. anew: instead of what has that name, a link not followed, since anybody
 * could have foreseen it. Returns 0 or an errno. Any thread, while others sample; takes the loader's lock for
 * a moment, so not from within malloc. Allocates nothing.
 */
int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path, bool anew);

#endif
