/*
 * What a wrong call gets: one line on stderr that names it and what the pointer is, the call stack where it
 * can be told, and then the end, unless the user asked to carry on.
 */
#ifndef CALM_API_MISUSE_H
#define CALM_API_MISUSE_H

#include "heap/heap.h"

void misuse_report(const struct misuse_record *misuse);

/* Of what the calling thread frees. */
void misuse_report_now(enum misuse kind, const void *pointer);

#endif
