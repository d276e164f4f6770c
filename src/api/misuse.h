/*
 * What a wrong call gets: one line on stderr that names it and what the pointer is, and its call stack if it
 * is the caller's; then the end, unless the user asked to carry on.
 */
#ifndef CALM_API_MISUSE_H
#define CALM_API_MISUSE_H

#include "heap/heap.h"

void misuse_report(const struct misuse_record *misuse);

/* The calling thread is freeing the pointer. */
void misuse_report_now(enum misuse kind, const void *pointer);

#endif
