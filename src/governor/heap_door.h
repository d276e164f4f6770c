/*
 * The heap's door: whoever took from the heap, or put into it, leaves by a look at the bound.
 */
#ifndef CALM_GOVERNOR_HEAP_DOOR_H
#define CALM_GOVERNOR_HEAP_DOOR_H

#include "governor/heap_lock.h"

/* After heap_enter. Looks whether too much is free, whether a misuse came to light, and whether a window is
 * over. */
void heap_leave(struct governor *governor);

#endif
