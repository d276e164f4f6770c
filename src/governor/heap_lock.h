/*
 * Into the heap and out of it again, without a look at the bound; see heap_door.h for that.
 */
#ifndef CALM_GOVERNOR_HEAP_LOCK_H
#define CALM_GOVERNOR_HEAP_LOCK_H

#include "governor/governor.h"

/* A heap with an owner is entered by the owner alone. */
static inline void heap_enter(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_acquire(&governor->heap_lock);
        governor->heap_locks++;
    }
}

static inline void heap_exit(struct governor *governor) {
    if (governor->owner == NULL) {
        lock_release(&governor->heap_lock);
    }
}

#endif
