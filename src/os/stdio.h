/*
 * The C library's list of open files, around fork.
 *
 * glibc's fork locks the list after all fork handlers, and the thread that holds it then may wait for a file
 * whose owner is in malloc. So the allocator locks the list before it takes its own locks for a fork, as
 * glibc does for its own malloc. The lock is recursive. Where the C library has no such functions, all of
 * these do nothing.
 */
#ifndef CALM_OS_STDIO_H
#define CALM_OS_STDIO_H

#include <stdbool.h>

/* In the forking thread, before any other lock is taken; and after all are released. */
void stdio_before_fork(void);
void stdio_after_fork(bool child);

#endif
