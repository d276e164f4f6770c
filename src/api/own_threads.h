/*
 * Stops the allocator's own threads around a call that changes the process's
 * credentials, namespaces or filters. A thread that exists before the call
 * would keep the old ones. No thread of the allocator runs between
 * own_threads_stop and own_threads_resume. Any thread may call these functions,
 * also in a signal handler, and in a child of vfork. They preserve errno.
 */
#ifndef CALM_API_OWN_THREADS_H
#define CALM_API_OWN_THREADS_H

#include <stdbool.h>

/* Returns the argument for own_threads_resume: true if this process has threads
 * of the allocator, and all of them have ended. Waits at most ten seconds. Does
 * not wait in a signal handler that interrupted the arena, because the threads
 * may wait for a lock that the interrupted thread holds. A thread that still
 * runs ends as soon as it can, and no other thread is started. */
bool own_threads_stop(void);
void own_threads_resume(bool stopped);

#endif
