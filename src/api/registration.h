/*
 * Threads and children without restartable sequences: the kernel keeps no CPU number for them, and restarts
 * nothing. They go past the CPU caches, to the heap, by its locks: see registration.c. Any thread; errno is
 * preserved.
 */
#ifndef CALM_API_REGISTRATION_H
#define CALM_API_REGISTRATION_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Around a system call that makes a child, or a thread, by clone's flags: one that runs on the caller's
 * thread-local storage finds a cache that is closed. before returns whether after is to be called, in the
 * parent, with the call's result: -1 or -errno if there is no child.
 */
bool registration_before_child(uint64_t flags);
void registration_after_child(long result);

/* Whether the caller is a child whose parent waits until the child has left its memory (CLONE_VFORK). Without
 * restartable sequences it may be one unknown. */
bool registration_is_suspended(void);

/* In a child of fork: its memory is its own. */
void registration_after_fork(void);

/* rseq(2), as called by the program. 0 or -errno. */
long registration_call(const long *arguments);

/*
 * The C library registers the area of a new thread only if that of its creator is registered. creator: in the
 * creator; 0 if the new thread need not begin with begin_thread.
 */
unsigned registration_of_creator(void);
void registration_begin_thread(unsigned creator);

#endif
