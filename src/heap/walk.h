/*
 * Checks a heap by a walk over all its pages, and compares what it finds with
 * the heap's own records. Every page belongs to one span, free neighbours are
 * merged, and each set, list, bitmap and count agrees. The walk aborts if
 * something disagrees. It exists only in builds with assertions, and in tests.
 *
 * Single-owner. One walk runs at a time, and nothing may change meanwhile.
 */
#ifndef CALM_HEAP_WALK_H
#define CALM_HEAP_WALK_H

#include "heap/purge_batch.h"

/* What a walk found. The pages that a purge claimed within slabs are known from
 * the batch only. */
struct heap_walk {
    size_t spans;
    size_t runs[RUN_KINDS], run_pages[RUN_KINDS];
    size_t purging_pages, large_pages, large_blocks, moved_blocks, slabs;
    size_t slab_used_pages, slab_dirty_pages, slabs_with_dirty, used_blocks;
};

/* `idle` is the number of descriptors that span_table_take_idle has taken.
 * `batch` is the batch that is out of the heap, or NULL. */
struct heap_walk heap_walk(const struct heap *heap, const struct purge_batch *batch, size_t idle);

#endif
