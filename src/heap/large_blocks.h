/*
 * Large blocks. Each is a span of whole pages, which may grow, shrink and move.
 *
 * Single-owner, except for functions marked "any thread". Their caller owns the
 * block.
 */
#ifndef CALM_HEAP_LARGE_BLOCKS_H
#define CALM_HEAP_LARGE_BLOCKS_H

#include "heap/heap.h"

/*
 * Takes a block of this number of pages. Returns NULL if memory is short. *zero
 * says whether the block is known to be zero. If `colored` is set, a block of a
 * huge page or more starts at a page whose color has room in heap->colors. The
 * owner of the block may move its start within the first page (span->offset),
 * before another thread knows the block.
 */
void *heap_take_large(struct heap *heap, size_t pages, size_t align_pages, enum run_choice choice,
                      bool colored, bool *zero);

/* Counts a new block as guessed, until it is freed or resized. Its memory may
 * be resident, although there is no evidence that the program will touch it. */
void heap_note_guess(struct heap *heap, struct span *span);

/* Frees a block, or records an invalid or double free. Returns NULL, or the
 * block's span if its pages were moved or marked. Such a span is out of the
 * heap: the caller renews its range (vm_renew), and puts it back by
 * heap_put_renewed. */
struct span *heap_put_large(struct heap *heap, void *block);
void heap_put_renewed(struct heap *heap, struct span *span, enum vm_renewed renewed);

/* Returns the span of the large block in use that starts at `block`, or NULL if
 * there is none. Any thread. */
struct span *heap_large_span(const struct heap *heap, const void *block);

/* Returns the span of the large block in use whose first page contains the
 * address, or NULL if there is none. Any thread. */
struct span *heap_large_span_at(const struct heap *heap, const void *address);

/* Resizes a large block in place to this number of pages. If that is
 * impossible, returns false, and the block keeps its size. */
bool heap_resize_large(struct heap *heap, struct span *span, size_t pages);

/* Records that vm_move_pages moved the pages of `from` to `to`. `from` becomes
 * a free, clean run. */
void heap_moved(struct heap *heap, struct span *from, struct span *to);

/* Returns whether one more block may be moved. The kernel keeps a mapping for
 * each moved block. */
bool heap_may_move(const struct heap *heap);

#endif
