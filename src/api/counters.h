/* The values of the allocator's counters, which counters.def lists. Thread-safe. */
#ifndef CALM_API_COUNTERS_H
#define CALM_API_COUNTERS_H

#include "calmalloc.h"
#include "os/text.h"

/* In a forked child, before it counts anything: its totals leave out what its parent had counted. Takes no
 * lock: no other thread is there. */
void counters_start_child(void);

/* All zero before the allocator is ready. */
void counters_fill(struct calm_stats *stats);

/* Appends each, by a format for its name, its value (%lu), and its name once more. */
void counters_print(struct text *text, const char *format);

#endif
