/* The profile as a file for pprof (profile.proto, uncompressed). Called by
 * heap_profile.c. */
#ifndef CALM_PROFILE_PPROF_H
#define CALM_PROFILE_PPROF_H

#include "profile/samples.h"

#include <stdbool.h>
#include <stdint.h>

/*
 * Writes the profile to a file, and creates the file if necessary. Returns 0 or
 * an errno. If `is_new` is true, writes only a new file: returns EEXIST if a
 * file or link of this name exists, and removes the file again if it cannot
 * write all of it.
 *
 * Any thread may call it while other threads sample. It takes the loader's
 * lock, and so must not be called within malloc. It allocates nothing.
 */
int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path, bool is_new);

#endif
