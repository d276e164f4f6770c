/* The values of the allocator's counters, which counters.def lists. Thread-safe. */
#ifndef CALM_API_COUNTERS_H
#define CALM_API_COUNTERS_H

#include "calmalloc.h"

/* All zero before the allocator is ready. */
void counters_fill(struct calm_stats *stats);

#endif
