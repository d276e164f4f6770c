/*
 * A batch: free pages of one heap or several on their way to the kernel. They
 * are taken out of the heaps, so that the system calls need no lock, and are put
 * back after the purge, whether it succeeded or not.
 *
 * Single-owner. A batch belongs to the caller from the time it is taken until
 * it is put back.
 */
#ifndef CALM_HEAP_PURGE_BATCH_H
#define CALM_HEAP_PURGE_BATCH_H

#include "heap/heap.h"
#include "os/purge.h"

#include <string.h>
#include <sys/uio.h>

#define PURGE_BYTES ((size_t)16 << 20)

/* The ranges to be purged, about 16 MiB at most. */
struct purge_batch {
    size_t count;
    size_t pages;
    struct iovec ranges[PURGE_MAX_RANGES];
    uint64_t refused[PURGE_MAX_RANGES / 64]; /* a bit for each range that the kernel did not purge */
};

static inline void purge_batch_clear(struct purge_batch *batch) {
    batch->count = 0;
    batch->pages = 0;
    memset(batch->refused, 0, sizeof batch->refused);
}

/* Notes that the kernel did not purge the ranges from number `first` on. */
static inline void purge_batch_refuse(struct purge_batch *batch, size_t first, size_t end) {
    for (size_t i = first; i < end; i++) {
        batch->refused[i / 64] |= (uint64_t)1 << (i % 64);
    }
}

static inline bool purge_batch_is_purged(const struct purge_batch *batch, size_t number) {
    return (batch->refused[number / 64] >> (number % 64) & 1) == 0;
}

enum purge_depth {
    PURGE_RUNS,  /* free runs, including whole huge-page regions */
    PURGE_SLABS, /* free pages within slabs */
    PURGE_SPLIT, /* parts of huge-page regions, also within slabs; the kernel splits their huge pages */
};

/*
 * Adds dirty pages of the heap to the batch, until the batch has `pages` pages,
 * about 16 MiB at most. Takes those of one depth, and of the runs only those of
 * at least `min_age` (runs_age), the coldest first. Returns the number of pages
 * added. It may be slightly higher than requested if they include pages within
 * slabs or whole huge-page regions.
 */
size_t heap_add_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth,
                      uint16_t min_age);

/* Clears the batch, and adds pages of the heap of all depths up to this one.
 * Returns their number. */
size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth);

/* Puts the heap's pages of a batch back. Those that the kernel refused stay dirty
 * and become the hottest, so that they are tried again last. The others are
 * clean now. */
void heap_put_back(struct heap *heap, const struct purge_batch *batch);

/* Returns the age of the heap's coldest dirty run, or -1 if there is none. */
int heap_coldest_age(const struct heap *heap);

/* Called in a forked child that lacks the thread that had taken a batch. The
 * pages of the batch stay out of the heap. The blocks that the batch claimed
 * count as in use from now on. */
void heap_lose_purge(struct heap *heap);

/* Returns the run or the slab that contains a range of a batch. Neither changes
 * before the batch is put back, so the caller needs no lock. */
static inline struct span *purge_batch_span(const struct heap *heap, const struct iovec *range) {
    return space_span_of(&heap->space, space_page(&heap->space, range->iov_base));
}

/* Returns whether a batch claimed the block of a slab. A claimed block is
 * free. */
bool heap_claims(const struct heap *heap, const char *block, size_t size);

#endif
