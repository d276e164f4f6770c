/* The report at exit: the counters and the options, as in calm_stats_json. */
#ifndef CALM_API_REPORT_H
#define CALM_API_REPORT_H

#include "os/text.h"

/* If the option requests a report, keeps a copy of stderr, which the program
 * may close before it ends. May be called any number of times. */
void report_prepare(void);

/* Called at the end of the process. Writes the requested report to the copy of
 * stderr. */
void report_write(void);

/* Appends the counters and the options as one JSON object. Thread-safe. */
void report_json(struct text *text);

#endif
