/*
 * A batch: free pages on their way to the kernel. They are taken out of the
 * heap, so that the system calls need no lock, and are put back after the
 * purge, whether it succeeded or not.
 *
 * Single-owner. A batch belongs to the caller from the time it is taken until
 * it is put back.
 */
#ifndef CALM_HEAP_PURGE_BATCH_H
#define CALM_HEAP_PURGE_BATCH_H

#include "heap/heap.h"
#include "os/purge.h"

#include <sys/uio.h>

#define PURGE_BYTES ((size_t)16 << 20)

/* The ranges to be purged, about 16 MiB at most. */
struct purge_batch {
    size_t count;
    size_t pages;
    struct iovec ranges[PURGE_MAX_RANGES];
};

enum purge_depth {
    PURGE_RUNS,  /* free runs, including whole huge-page regions */
    PURGE_SLABS, /* then free pages within slabs */
    PURGE_SPLIT, /* then parts of huge-page regions, also within slabs; the kernel splits their huge pages */
};

/*
 * Takes up to this number of dirty pages out of the heap, the coldest first,
 * and about 16 MiB at most. Returns the number of pages taken. It may be
 * slightly higher than requested if they include pages within slabs or whole
 * huge-page regions.
 */
size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth);

/* Puts a batch back. Its first `purged` ranges are clean now. The others stay
 * dirty and become the hottest, so that they are tried again last. */
void heap_put_back(struct heap *heap, struct purge_batch *batch, size_t purged);

/* Called in a forked child that lacks the thread that had taken a batch. The
 * pages of the batch stay out of the heap. The blocks that the batch claimed
 * count as in use from now on. */
void heap_lose_purge(struct heap *heap);

/* Returns the run or the slab that contains a range of a batch. Neither changes
 * before the batch is put back, so the caller needs no lock. */
static inline struct span *purge_batch_span(const struct heap *heap, const struct iovec *range) {
    return space_span_of(&heap->space, space_page(&heap->space, range->iov_base));
}

/* Returns whether the batch claimed the block of a slab. A claimed block is
 * free. `batch` may be NULL. */
bool purge_batch_claims(const struct purge_batch *batch, const char *block, size_t size);

#endif
