/*
 * The heap's door: a thread that took from the heap, or put into it, checks the bound as it leaves.
 */
#ifndef CALM_GOVERNOR_HEAP_DOOR_H
#define CALM_GOVERNOR_HEAP_DOOR_H

#include "governor/heap_lock.h"

/* After heap_enter. Looks whether too much is free, whether a misuse came to light, and whether a window is
 * over. */
void heap_leave(struct governor *governor);

#endif
