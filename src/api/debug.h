/*
 * Descriptions of pointers, for debuggers (calm_debug_block) and for reports of
 * invalid and double frees.
 */
#ifndef CALM_API_DEBUG_H
#define CALM_API_DEBUG_H

#include "os/text.h"

/* Appends the pointer and what it is, in one line. Any thread may call it, also
 * within the allocator. It takes no lock and makes no system call. The
 * description may be out of date if other threads change the heap meanwhile. */
void debug_describe(const void *pointer, struct text *text);

#endif
