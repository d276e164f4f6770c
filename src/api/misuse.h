/* What a wrong call gets: one line on stderr that names it, and then the end, unless the user asked to carry
 * on. */
#ifndef CALM_API_MISUSE_H
#define CALM_API_MISUSE_H

#include "heap/heap.h"

void misuse_report(enum misuse kind, const void *pointer);

#endif
