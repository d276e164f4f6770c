/* What the library tells its user: one line at start-up if asked, statistics at exit if asked. */
#ifndef PTLBMALLOC2_REPORT_H
#define PTLBMALLOC2_REPORT_H

#include "governor.h"
#include "options.h"

/* One line on stderr: governing, or why not; and one more on placement, where it was asked for. */
void report_start(const struct governor_stats *stats, const struct options *options);

/* In the format and to the place of the options; JSON is appended to the file as one line. */
void report_stats(const struct governor_stats *stats, const struct options *options);

#endif
