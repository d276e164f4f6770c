/*
 * Reports of invalid and double frees. A report is one line on stderr that
 * names the error and describes the pointer. The call stack follows if the
 * error is in the current call. Then the process aborts, unless an option lets
 * it continue.
 */
#ifndef CALM_API_MISUSE_H
#define CALM_API_MISUSE_H

#include "heap/heap.h"

void misuse_report(const struct misuse_record *misuse);

/* Called by the thread that is freeing the pointer. */
void misuse_report_now(enum misuse kind, const void *pointer);

#endif
