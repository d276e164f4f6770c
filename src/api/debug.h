/* What a pointer is, for debuggers (calm_debug_block) and for reports of misuse. */
#ifndef CALM_API_DEBUG_H
#define CALM_API_DEBUG_H

#include "os/text.h"

/* Appends the pointer and what it is, in one line. Any thread, within the allocator too: takes no lock, and
 * makes no system call. What it says may be out of date while other threads change the heap. */
void debug_describe(const void *pointer, struct text *text);

#endif
