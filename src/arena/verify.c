#include "arena/verify.h"

#include "arena/select.h"

#ifdef CALM_ASSERTIONS

#include "heap/walk.h"

/* All walks use one set of tables, so only one walk runs at a time. */
static _Atomic(bool) walking;

bool verify_is_on(const struct arenas *arenas) {
    return setting_value(&arenas->settings.check_interval) > 0;
}

bool verify_is_due(const struct arenas *arenas, uint64_t checks) {
    return verify_is_on(arenas) && checks % (unsigned)setting_value(&arenas->settings.check_interval) == 0;
}

void verify_purged(struct arenas *arenas) {
    if (!verify_is_on(arenas) || arenas->of[0].heap.purge_is_lost || atomic_exchange(&walking, true)) {
        return;
    }
    unsigned number = 0;
    for (struct arena *arena; (arena = arena_next(arenas, &number)) != NULL;) {
        heap_lock(arena);
        heap_walk(&arena->heap, NULL, 0);
        heap_unlock(arena);
    }
    atomic_store(&walking, false);
}

void verify_arena(struct arenas *arenas) {
    if (verify_is_on(arenas) && lock_try(&arenas->purger.lock)) {
        verify_purged(arenas);
        lock_release(&arenas->purger.lock);
    }
}

#endif
