/*
 * Walks all of a heap by its pages, and compares what is there with what the heap says of itself: every page
 * belongs to one span, free neighbours are joined, and each set, list, bitmap and count agrees. Aborts if
 * something does not. Only in builds with assertions, and in tests.
 *
 * Single-owner, and one walk at a time: nothing may change meanwhile.
 */
#ifndef CALM_HEAP_WALK_H
#define CALM_HEAP_WALK_H

#include "heap/purge_batch.h"

/* What a walk found. Of pages within slabs, those that a batch holds are known by the batch alone. */
struct heap_walk {
    size_t spans;
    size_t runs[RUN_KINDS], run_pages[RUN_KINDS];
    size_t purging_pages, large_pages, large_blocks, moved_blocks, slabs;
    size_t slab_used_pages, slab_dirty_pages, slabs_with_dirty, used_blocks;
};

/* idle: descriptors that span_table_take_idle holds. batch: ranges handed out, or NULL. */
struct heap_walk heap_walk(const struct heap *heap, const struct purge_batch *batch, size_t idle);

#endif
