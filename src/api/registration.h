/*
 * Threads and children without restartable sequences. The kernel keeps no CPU
 * number for them, and restarts nothing. They bypass the CPU caches, and use
 * the arena under its locks: see registration.c. Any thread may call these
 * functions, which preserve errno.
 */
#ifndef CALM_API_REGISTRATION_H
#define CALM_API_REGISTRATION_H

#include <stdbool.h>
#include <stdint.h>

/* Called around a system call that makes a child or a thread; the flags are
 * those of clone. A child on the caller's thread-local storage then finds a
 * closed cache. If registration_before_child returns true, the parent must call
 * registration_after_child with the result of the call, which is -1 or -errno
 * if there is no child. */
bool registration_before_child(uint64_t flags);
void registration_after_child(long result);

/* Returns whether the caller is a child whose parent waits until the child has
 * left its memory (CLONE_VFORK). Without restartable sequences, returns false
 * for such a child, too. */
bool registration_is_suspended(void);

/* Called in a child of fork, which has a memory of its own. */
void registration_after_fork(void);

/* Makes the program's call of rseq(2). Returns 0 or -errno. */
long registration_call(const long *arguments);

/* The C library registers the area of a new thread only if its creator's area
 * is registered, or not at all. The creator therefore calls
 * registration_of_creator. If the result is not 0, the new thread begins with
 * registration_begin_thread. */
int registration_of_creator(void);
void registration_begin_thread(int creator);

#endif
