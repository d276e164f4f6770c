/*
 * Stops the allocator's own threads around a call that changes the process's credentials, namespaces or
 * filters: a thread that was started before would keep the old ones. None runs between own_threads_stop and
 * own_threads_resume. Any thread, also in a signal handler and in a child of vfork. Preserves errno.
 */
#ifndef CALM_API_OWN_THREADS_H
#define CALM_API_OWN_THREADS_H

#include <stdbool.h>

/* Returns the argument for own_threads_resume: whether this process has such threads, and none is left. Waits
 * ten seconds at most, and not at all in a signal handler that interrupted what they may wait for: one that
 * is left ends as soon as it can, and none is started again. */
bool own_threads_stop(void);
void own_threads_resume(bool stopped);

#endif
