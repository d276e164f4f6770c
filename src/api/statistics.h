/* The allocator's counters, for calm_stats, mallinfo, malloc_info and the report at exit. */
#ifndef CALM_API_STATISTICS_H
#define CALM_API_STATISTICS_H

#include "calmalloc.h"

#include "os/text.h"

/* All zero before the allocator is ready. */
void statistics_fill(struct calm_stats *stats);

/* At the start, if a report was asked for: sees to it that it can be written at the end. */
void statistics_prepare_report(void);

/* At the end, if a report was asked for: writes it. */
void statistics_report(void);

/* One JSON object of the counters and the options. */
void statistics_json(struct text *text);

#endif
