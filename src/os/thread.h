/* A bare thread: the kernel's, without the C library's. */
#ifndef CALM_OS_THREAD_H
#define CALM_OS_THREAD_H

#include <stdbool.h>
#include <stddef.h>

/*
 * Runs body(argument) in a thread with all signals blocked, on a stack of its own, and with a block
 * of zeros where thread-local storage would be: body must not call what needs the C library's
 * thread. False if the kernel refuses. Preserves errno; allocates address space only.
 */
bool thread_start(void (*body)(void *argument), void *argument, size_t stack_bytes);

/*
 * From now on the calling thread has a table of open files of its own, an empty one: what it opens takes no
 * number that the program counts on, and nothing of the program's stays open because of it. Without effect
 * before Linux 5.9.
 */
void thread_leave_files(void);

#endif
