#include "governor/flush.h"

#include "base/assert.h"
#include "base/size.h"
#include "governor/limit.h"
#include "governor/purger.h"

/* Caches whose blocks may keep alive more than this part of all pages are sparse. */
#define SPARSE_DIVISOR 4

/* Takes blocks that leave a cache. Under the purger's lock. */
static void put_and_purge(void *context, void *const *blocks, size_t count) {
    struct governor *governor = context;
    heap_lock(governor);
    calm_assert(lock_is_mine(&governor->purge_lock) && count > 0, count);
    heap_put_blocks(&governor->heap, blocks, count);
    bool over = is_over(governor, limit_now(governor).max);
    heap_unlock(governor);
    if (over) {
        purge_to_limit(governor);
    }
}

void flush_caches(struct governor *governor, bool all) {
    calm_assert(lock_is_mine(&governor->purge_lock));
    for (unsigned i = 0; i < governor->caches->count && governor->caches->states != NULL; i++) {
        cpu_cache_flush(governor->caches, i, !all, put_and_purge, governor);
    }
    if (all && governor->exclusive) {
        governor->ops->flush(governor->ops->context);
    }
    for (unsigned i = 0; i < governor->depot_count; i++) {
        depot_flush(&governor->depots[i], all, put_and_purge, governor);
    }
}

size_t governor_cached(const struct governor *governor, size_t *bytes) {
    size_t more = 0;
    size_t blocks = cpu_caches_blocks(governor->caches, bytes);
    if (governor->exclusive) {
        blocks += governor->ops->cached(governor->ops->context, &more);
    }
    *bytes += more;
    for (unsigned i = 0; i < governor->depot_count; i++) {
        blocks += depot_blocks(&governor->depots[i], &more);
        *bytes += more;
    }
    return blocks;
}

/*
 * A program that frees most of its memory leaves the last blocks in the caches, and each may keep a page
 * alive, or several: when that could be a good part of all pages, the caches are flushed. Under the purger's
 * lock, before a purge, which costs more.
 */
static void flush_if_sparse(struct governor *governor) {
    size_t bytes;
    size_t blocks = governor_cached(governor, &bytes);
    heap_lock(governor);
    size_t footprint = footprint_pages(governor);
    heap_unlock(governor);
    if (size_max(blocks, bytes / page_bytes(governor)) > footprint / SPARSE_DIVISOR) {
        flush_caches(governor, true);
    }
}

void enforce_limit(struct governor *governor) {
    if (!purger_enter(governor)) {
        return;
    }
    heap_lock(governor);
    end_backoff(governor);
    bool over = is_over(governor, limit_now(governor).max);
    heap_unlock(governor);
    if (over) {
        flush_if_sparse(governor);
        purge_to_limit(governor);
    }
    purger_leave(governor);
}
