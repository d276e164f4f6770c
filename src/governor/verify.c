#include "governor/verify.h"

#ifdef CALM_ASSERTIONS

#include "heap/walk.h"

/* A walk needs tables that there is one of. */
static _Atomic(bool) walking;

bool governor_verifies(const struct governor *governor) {
    return setting_value(&governor->settings.check_interval) > 0;
}

bool governor_should_verify(const struct governor *governor) {
    return governor_verifies(governor) &&
           governor->checks % (unsigned)setting_value(&governor->settings.check_interval) == 0;
}

void governor_verify_purged(struct governor *governor) {
    if (!governor_verifies(governor) || governor->heap.purge_is_lost || atomic_exchange(&walking, true)) {
        return;
    }
    heap_lock(governor);
    heap_walk(&governor->heap, NULL, 0);
    heap_unlock(governor);
    atomic_store(&walking, false);
}

void governor_verify(struct governor *governor) {
    if (governor_verifies(governor) && lock_try(&governor->purge_lock)) {
        governor_verify_purged(governor);
        lock_release(&governor->purge_lock);
    }
}

#endif
