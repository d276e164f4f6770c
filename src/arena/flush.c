#include "arena/flush.h"

#include "arena/limit.h"
#include "arena/purger.h"
#include "arena/select.h"
#include "base/assert.h"
#include "base/size.h"

#include <string.h>

/* Caches are sparse if their blocks may keep more than 1/SPARSE_DIVISOR of all
 * pages in use. */
#define SPARSE_DIVISOR 4

/* Puts blocks into the heaps that contain them, as they leave a cache. */
static void flush_blocks(struct arenas *arenas, void *const *blocks, size_t count) {
    void *sorted[MAX_MAGAZINE_BLOCKS];
    calm_assert(count <= MAX_MAGAZINE_BLOCKS, count);
    memcpy(sorted, blocks, count * sizeof *blocks);
    while (count > 0) {
        size_t gathered = arena_is_alone(arenas) ? count : arena_gather(arenas, sorted, count);
        count -= gathered;
        struct arena *arena = arena_of(arenas, sorted[count]);
        heap_lock(arena);
        heap_put_blocks(&arena->heap, sorted + count, gathered);
        report_levels(arenas, arena);
        heap_unlock(arena);
    }
}

/* Puts blocks that leave a cache into the heaps, and purges if these then exceed
 * the limit. The caller holds the purger's lock. */
static void put_and_purge(void *context, void *const *blocks, size_t count) {
    struct arenas *arenas = context;
    calm_assert(lock_is_mine(&arenas->purger.lock) && count > 0, count);
    for (size_t done = 0; done < count; done += MAX_MAGAZINE_BLOCKS) {
        flush_blocks(arenas, blocks + done, size_min(count - done, MAX_MAGAZINE_BLOCKS));
    }
    struct levels totals = totals_now(arenas);
    if (is_over(arenas, totals.dirty, limit_for(arenas, totals).max)) {
        purge_to_limit(arenas);
    }
}

void flush_caches(struct arenas *arenas, bool all) {
    calm_assert(lock_is_mine(&arenas->purger.lock));
    for (unsigned i = 0; i < arenas->caches->count && arenas->caches->states != NULL; i++) {
        cpu_cache_flush(arenas->caches, i, !all, put_and_purge, arenas);
    }
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        depot_flush(&arenas->depots[i], all, put_and_purge, arenas);
    }
}

size_t arena_cached(const struct arenas *arenas, size_t *bytes) {
    size_t more;
    size_t blocks = cpu_caches_blocks(arenas->caches, bytes);
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        blocks += depot_blocks(&arenas->depots[i], &more);
        *bytes += more;
    }
    return blocks;
}

size_t arena_max_cached(const struct arenas *arenas) {
    size_t bytes;
    size_t blocks = cpu_caches_max_blocks(arenas->caches, &bytes);
    for (unsigned i = 0; i < arenas->depot_count; i++) {
        size_t more;
        blocks += depot_max_blocks(&arenas->depots[i], &more);
        bytes += more;
    }
    return bytes + blocks * page_bytes(arenas);
}

/*
 * Flushes the caches if their blocks may keep a large part of all pages in use.
 *
 * A program that frees most of its memory leaves the last blocks in the caches.
 * Each may keep a page or several in use. The caller holds the purger's lock,
 * and purges next, which costs more than the flush.
 */
static void flush_if_sparse(struct arenas *arenas) {
    size_t bytes;
    size_t blocks = arena_cached(arenas, &bytes);
    size_t footprint = used_pages(arenas) + dirty_pages(arenas);
    if (size_max(blocks, bytes / page_bytes(arenas)) > footprint / SPARSE_DIVISOR) {
        flush_caches(arenas, true);
    }
}

void enforce_limit(struct arenas *arenas) {
    purger_enter(arenas);
    end_backoff(arenas);
    struct levels totals = report_all(arenas);
    if (is_over(arenas, totals.dirty, limit_for(arenas, totals).max)) {
        flush_if_sparse(arenas);
        purge_to_limit(arenas);
    }
    purger_leave(arenas);
}
