#include "governor/shed.h"

#include "governor/bound.h"
#include "governor/heap_lock.h"
#include "governor/purger.h"

/* Caches whose blocks may keep alive more than this part of all pages are sparse. */
#define SPARSE_DIVISOR 4

/* What leaves a cache. Under the purger's lock. */
static void put_and_purge(void *context, void *const *blocks, size_t count) {
    struct governor *governor = context;
    heap_enter(governor);
    heap_put_blocks(&governor->heap, blocks, count);
    bool over = is_over(governor, limit_pages(governor));
    heap_exit(governor);
    if (over) {
        purge_to_limit(governor);
    }
}

void shed_caches(struct governor *governor, bool all) {
    for (unsigned i = 0; i < governor->caches->count && governor->caches->states != NULL; i++) {
        cpu_cache_drain(governor->caches, i, !all, put_and_purge, governor);
    }
    if (all && governor->owner != NULL) {
        governor->owner->shed(governor->owner->context);
    }
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_shed(&governor->depots[i], all, put_and_purge, governor);
    }
}

size_t governor_cached(const struct governor *governor, size_t *bytes) {
    size_t blocks = cpu_caches_blocks(governor->caches, bytes);
    const struct governor_owner *owner = governor->owner;
    if (owner != NULL) {
        size_t more;
        blocks += owner->cached(owner->context, &more);
        *bytes += more;
    }
    for (unsigned i = 0; i < governor->depot_count; i++) {
        size_t more;
        blocks += depot_blocks(&governor->depots[i], &more);
        *bytes += more;
    }
    return blocks;
}

/*
 * A program that frees most of what it had leaves the last of it in the caches, and each of those blocks may
 * keep a page: when that could be a good part of all there is, the caches are emptied. Under the purger's
 * lock, before a purge, which costs more.
 */
static void shed_if_sparse(struct governor *governor) {
    size_t bytes;
    size_t kept_pages = governor_cached(governor, &bytes);
    heap_enter(governor);
    size_t footprint = heap_used_pages(&governor->heap) + heap_dirty_pages(&governor->heap);
    heap_exit(governor);
    if (kept_pages > footprint / SPARSE_DIVISOR) {
        shed_caches(governor, true);
    }
}

void relieve(struct governor *governor) {
    if (!purger_enter(governor)) {
        return;
    }
    heap_enter(governor);
    forgive(governor);
    bool over = is_over(governor, limit_pages(governor));
    heap_exit(governor);
    if (over) {
        shed_if_sparse(governor);
        purge_to_limit(governor);
    }
    purger_leave(governor);
}
