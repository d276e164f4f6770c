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

#endif
