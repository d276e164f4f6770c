/*
 * The helper: a thread of the allocator that purges after a program that went idle.
 *
 * It has no thread-local storage, no C library and no signals: it runs governor_tick between waits. A thread
 * that leaves the heap starts it: any but the first, or the first if more memory may be kept with a helper.
 * It ends after half a second without work, once the first thread is alone and keeps little, and in a forked
 * child. It has a file table of its own, no capabilities, and is stopped around calls that change what the
 * process may do.
 */
#ifndef CALM_GOVERNOR_HELPER_H
#define CALM_GOVERNOR_HELPER_H

#include "governor/state.h"

/* Whether a helper may run. */
bool governor_wants_helper(const struct governor *governor);

/* Starts the helper if its state still is the one that was seen. Any thread; true if this call started it. */
bool helper_start(struct governor *governor, enum helper_state seen);

/* No helper starts from here to helper_resume. Any thread, also in a signal handler. */
void helper_hold(void);

/*
 * No helper runs from the return of helper_stop to helper_resume. Any thread, also in a signal handler, and
 * in a child of vfork. False if it still runs after the timeout, because a debugger stopped it, or because it
 * waits for a thread that waits for the caller: then it ends as soon as it can, and none starts before
 * helper_resume.
 */
bool helper_stop(struct governor *governor, uint64_t timeout_ns);
void helper_resume(void);

/* Whether the governor's helper belongs to this process: not in a child of vfork, nor in one that was forked
 * without the C library's handlers. */
bool helper_is_of_this_process(const struct governor *governor);

/* In a forked child. */
void helper_forget(struct governor *governor);

/* The process ends, and with it all that it holds: from now on no helper starts. Also in a signal handler,
 * whatever it interrupted. */
void governor_end(struct governor *governor);

#endif
