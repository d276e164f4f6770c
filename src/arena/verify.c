#include "arena/verify.h"

#ifdef CALM_ASSERTIONS

#include "heap/walk.h"

/* All walks use one set of tables, so only one walk runs at a time. */
static _Atomic(bool) walking;

bool verify_is_on(const struct arena *arena) {
    return setting_value(&arena->settings.check_interval) > 0;
}

bool verify_is_due(const struct arena *arena) {
    return verify_is_on(arena) &&
           arena->limit.checks % (unsigned)setting_value(&arena->settings.check_interval) == 0;
}

void verify_purged(struct arena *arena) {
    if (!verify_is_on(arena) || arena->heap.purge_is_lost || atomic_exchange(&walking, true)) {
        return;
    }
    heap_lock(arena);
    heap_walk(&arena->heap, NULL, 0);
    heap_unlock(arena);
    atomic_store(&walking, false);
}

void verify_arena(struct arena *arena) {
    if (verify_is_on(arena) && lock_try(&arena->purger.lock)) {
        verify_purged(arena);
        lock_release(&arena->purger.lock);
    }
}

#endif
