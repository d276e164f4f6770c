/*
 * The C library's list of open files, around fork.
 *
 * glibc's fork locks this list after all fork handlers. At that time, another
 * thread may hold the list and wait for a file whose owner is in malloc. The
 * allocator therefore locks the list before its own locks for a fork, as glibc
 * does for its own malloc. The list's lock is recursive. If the C library has
 * no such functions, the functions below do nothing.
 */
#ifndef CALM_OS_STDIO_H
#define CALM_OS_STDIO_H

#include <stdbool.h>

/* The forking thread calls stdio_before_fork before it takes any other lock,
 * and stdio_after_fork after it has released all of them. */
void stdio_before_fork(void);
void stdio_after_fork(bool child);

#endif
