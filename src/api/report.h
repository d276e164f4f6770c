/* The report at exit: the counters and the options, as calm_stats_json has them. */
#ifndef CALM_API_REPORT_H
#define CALM_API_REPORT_H

#include "os/text.h"

/* Once the option asks for a report: keeps stderr, which the program may close before it ends. Any number of
 * times. */
void report_prepare(void);

/* At the end of the process: writes the report, if it was asked for, to the stderr that was kept. */
void report_write(void);

/* Appends one JSON object of the counters and the options. Thread-safe. */
void report_json(struct text *text);

#endif
