/*
 * The helper: a thread of ours that tidies up after a program that went idle.
 *
 * It has no thread-local storage, no C library and no signals: all it runs is governor_tick, between waits.
 * It is there only while there is something to tidy: started by a thread of the program's that comes to the
 * heap, other than the first one; gone within a second of quiet, and in a forked child. It has files of its
 * own, no capabilities, and is stopped around what changes what the process may do.
 */
#ifndef CALM_GOVERNOR_HELPER_H
#define CALM_GOVERNOR_HELPER_H

#include "governor/governor.h"

enum helper_state {
    HELPER_NONE,
    HELPER_RUNS,
    HELPER_AWAY,      /* there was nothing to tidy, or it was stopped: the next thread to come starts it */
    HELPER_ALONE,     /* the first thread is alone again: the next other thread to come does */
    HELPER_ELSEWHERE, /* a server does its work */
    HELPER_REFUSED, /* by the kernel: tried again after many visits to the heap; of a heap with clients, never
                     */
};

#define WINDOW_NS DEMAND_WINDOW_NS

/* Starts it where it is not, in the state that was seen. Any thread; true for the one whose call started it.
 */
bool helper_start(struct governor *governor, enum helper_state seen);

/* None is started from here to helper_resume. Any thread, also in a signal handler. */
void helper_hold(void);

/*
 * None runs from the return of helper_stop to helper_resume. Any thread, also in a signal handler, and in a
 * child of vfork. False if it is still there after so long, since it is being debugged, or waits for a thread
 * that waits for the caller: it ends as soon as it can, and none is started again before helper_resume.
 */
bool helper_stop(struct governor *governor, uint64_t patience_ns);
void helper_resume(void);

/* Whether the governor's threads are this process's: not in a child of vfork, nor in one that was forked
 * without the C library's handlers. */
bool helper_is_of_this_process(const struct governor *governor);

/* In a forked child. */
void helper_forget(struct governor *governor);

#endif
