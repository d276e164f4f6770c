/*
 * The profile as a file for pprof (profile.proto, uncompressed). Called by heap_profile.c.
 */
#ifndef CALM_PROFILE_PPROF_H
#define CALM_PROFILE_PPROF_H

#include "profile/samples.h"

#include <stdbool.h>
#include <stdint.h>

/*
 * Writes the file, and creates it if need be. is_new: only a new one, which is removed again if not all of it
 * can be written; EEXIST where there is a file or link of this name. Returns 0 or an errno. Any thread, while
 * others sample; not from within malloc: takes the loader's lock. Allocates nothing.
 */
int pprof_write(struct samples *samples, uint64_t mean_bytes, const char *path, bool is_new);

#endif
