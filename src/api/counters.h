/* The values of the allocator's counters, which counters.def lists. */
#ifndef CALM_API_COUNTERS_H
#define CALM_API_COUNTERS_H

#include "calmalloc.h"
#include "os/text.h"

/* Called in a forked child, before it counts anything. The child's totals then
 * leave out what its parent had counted. Takes no lock, because the child has
 * no other thread. */
void counters_start_child(void);

/* Fills in all counters. They are zero before the allocator is ready.
 * Thread-safe. */
void counters_fill(struct calm_stats *stats);

/* Appends each counter by a format for its name, its value (%lu), and its name
 * again. Thread-safe. */
void counters_print(struct text *text, const char *format);

#endif
