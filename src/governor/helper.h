/*
 * The helper: a thread of ours that tidies up after a program that went idle.
 *
 * It has no thread-local storage, no C library and no signals: all it runs is governor_tick, between waits.
 * Started once the program is seen to have threads of its own; gone in a forked child.
 */
#ifndef CALM_GOVERNOR_HELPER_H
#define CALM_GOVERNOR_HELPER_H

#include "governor/governor.h"

enum helper_state {
    HELPER_NONE,
    HELPER_AWAKE,
    HELPER_ASLEEP, /* until the bell rings: there was nothing to tidy */
    HELPER_REFUSED,
};

#define WINDOW_NS 100000000ULL

/* Starts it if it does not run. Any thread; true for the one whose call started it. */
bool helper_start(struct governor *governor);

/* Wakes it if it sleeps for good. Any thread. */
void helper_wake(struct governor *governor);

#endif
