/*
 * Free pages on their way to the kernel: taken out of the heap in a batch, so that the system calls need no
 * lock, and put back when they are purged, or not.
 *
 * Single-owner; a batch that was taken belongs to the caller until it is put back.
 */
#ifndef CALM_HEAP_PURGE_BATCH_H
#define CALM_HEAP_PURGE_BATCH_H

#include "heap/heap.h"
#include "os/purge.h"

#include <sys/uio.h>

#define PURGE_BYTES ((size_t)16 << 20)

/* Ranges to be purged, at most about 16 MiB. */
struct purge_batch {
    size_t count;
    size_t pages;
    struct iovec ranges[PURGE_MAX_RANGES];
};

enum purge_depth {
    PURGE_RUNS,  /* free runs, and of huge-page regions only whole ones */
    PURGE_SLABS, /* then pages within slabs */
    PURGE_SPLIT, /* then parts of huge-page regions, slabs too: the kernel splits huge pages for them */
};

/*
 * Takes up to so many dirty pages out of the free set, the coldest first. Returns how many: a little more
 * where pages within slabs or whole huge-page regions are among them, and at most about 16 MiB.
 */
size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth);

/* The first purged ranges of the batch are clean now; the others stay dirty, and are the last to be tried
 * again. */
void heap_put_back(struct heap *heap, struct purge_batch *batch, size_t purged);

/* In a forked child, where the thread that had taken a batch does not exist: the pages stay as they are.
 * Blocks that it claimed count as used, for good. */
void heap_lose_purge(struct heap *heap);

/* The run, or the slab, that a range of a batch is part of. Neither changes meanwhile: no lock is needed. */
static inline struct span *purge_batch_span(const struct heap *heap, const struct iovec *range) {
    return space_span_of(&heap->space, space_page(&heap->space, range->iov_base));
}

/* Whether a batch, or NULL, has claimed a block of a slab, which then is free. */
bool purge_batch_claims(const struct purge_batch *batch, const char *block, size_t size);

#endif
