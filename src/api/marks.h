/* System calls by which a program may mark pages of its blocks: see marks.c. */
#ifndef CALM_API_MARKS_H
#define CALM_API_MARKS_H

/* Makes a system call of six arguments, and notes what it marked. Returns its result, or -errno. Any thread
 * and signal handler. */
long marks_call(long number, const long *arguments);

/* Notes what a call marked whose arguments point to the ranges, or that concerns all memory: one that
 * succeeded. */
void marks_note_pointed(long number, const long *arguments);

#endif
