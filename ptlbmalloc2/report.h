/*
 * What the library reports: a line at start-up and statistics at exit to the user, if the options say so, and
 * its counters to other processes at any time (os/counter_table.h, the table in report.c).
 */
#ifndef PTLBMALLOC2_REPORT_H
#define PTLBMALLOC2_REPORT_H

/* On stderr: that glibc is governed, or why not; and the same of placement, if it was asked for. */
void report_start(void);

/* JSON is appended to the file of the options as one line. */
void report_stats(void);

#endif
