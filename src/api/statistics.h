/* The allocator's counters, for calm_stats, mallinfo, malloc_info and the report at exit. */
#ifndef CALM_API_STATISTICS_H
#define CALM_API_STATISTICS_H

#include "calmalloc.h"

#include "os/text.h"

void statistics_fill(struct calm_stats *stats);

/* One JSON object of the counters and the options. */
void statistics_json(struct text *text);

#endif
