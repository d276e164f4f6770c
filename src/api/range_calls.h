/* System calls by which a program may mark pages of its blocks
 * (heap/marks.h). */
#ifndef CALM_API_RANGE_CALLS_H
#define CALM_API_RANGE_CALLS_H

/* Makes a system call of six arguments, and notes what it marked. Returns its
 * result, or -errno. Any thread and any signal handler may call it. */
long marks_call(long number, const long *arguments);

/* Notes what a successful call marked. The call concerns all memory, or its
 * arguments point to ranges. Only after a success are these pointers known to
 * be valid. */
void marks_note_pointed(long number, const long *arguments);

#endif
