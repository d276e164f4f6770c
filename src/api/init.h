/*
 * The start, forks and the end of the process's allocator. init.c has all of their steps in their order.
 */
#ifndef CALM_API_INIT_H
#define CALM_API_INIT_H

#include "api/state.h"

#include <stdbool.h>

/* Starts the allocator at the first call; any number of calls, from any thread. False if there is no memory
 * at all, or a sanitizer brings an allocator of its own. Preserves errno. */
bool allocator_ready(void);

#endif
