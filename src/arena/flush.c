#include "arena/flush.h"

#include "arena/limit.h"
#include "arena/purger.h"
#include "base/assert.h"
#include "base/size.h"

/* Caches are sparse if their blocks may keep more than 1/SPARSE_DIVISOR of all
 * pages in use. */
#define SPARSE_DIVISOR 4

/* Puts blocks that leave a cache into the heap, and purges if the heap then
 * exceeds the limit. The caller holds the purger's lock. */
static void put_and_purge(void *context, void *const *blocks, size_t count) {
    struct arena *arena = context;
    heap_lock(arena);
    calm_assert(lock_is_mine(&arena->purger.lock) && count > 0, count);
    heap_put_blocks(&arena->heap, blocks, count);
    bool over = is_over(arena, limit_now(arena).max);
    heap_unlock(arena);
    if (over) {
        purge_to_limit(arena);
    }
}

void flush_caches(struct arena *arena, bool all) {
    calm_assert(lock_is_mine(&arena->purger.lock));
    for (unsigned i = 0; i < arena->caches->count && arena->caches->states != NULL; i++) {
        cpu_cache_flush(arena->caches, i, !all, put_and_purge, arena);
    }
    for (unsigned i = 0; i < arena->depot_count; i++) {
        depot_flush(&arena->depots[i], all, put_and_purge, arena);
    }
}

size_t arena_cached(const struct arena *arena, size_t *bytes) {
    size_t more;
    size_t blocks = cpu_caches_blocks(arena->caches, bytes);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        blocks += depot_blocks(&arena->depots[i], &more);
        *bytes += more;
    }
    return blocks;
}

size_t arena_max_cached(const struct arena *arena) {
    size_t bytes;
    size_t blocks = cpu_caches_max_blocks(arena->caches, &bytes);
    for (unsigned i = 0; i < arena->depot_count; i++) {
        size_t more;
        blocks += depot_max_blocks(&arena->depots[i], &more);
        bytes += more;
    }
    return bytes + blocks * page_bytes(arena);
}

/*
 * Flushes the caches if their blocks may keep a large part of all pages in use.
 *
 * A program that frees most of its memory leaves the last blocks in the caches.
 * Each may keep a page or several in use. The caller holds the purger's lock,
 * and purges next, which costs more than the flush.
 */
static void flush_if_sparse(struct arena *arena) {
    size_t bytes;
    size_t blocks = arena_cached(arena, &bytes);
    heap_lock(arena);
    size_t footprint = footprint_pages(arena);
    heap_unlock(arena);
    if (size_max(blocks, bytes / page_bytes(arena)) > footprint / SPARSE_DIVISOR) {
        flush_caches(arena, true);
    }
}

void enforce_limit(struct arena *arena) {
    purger_enter(arena);
    heap_lock(arena);
    end_backoff(arena);
    bool over = is_over(arena, limit_now(arena).max);
    heap_unlock(arena);
    if (over) {
        flush_if_sparse(arena);
        purge_to_limit(arena);
    }
    purger_leave(arena);
}
