/*
 * Large blocks: each a span of whole pages, which may grow, shrink and move.
 *
 * Single-owner, except for functions marked "any thread", whose caller owns the block.
 */
#ifndef CALM_HEAP_LARGE_BLOCKS_H
#define CALM_HEAP_LARGE_BLOCKS_H

#include "heap/heap.h"

/*
 * A block of so many pages, or NULL if memory is short; *zero says whether it is known to be zero. colored:
 * whether a block of a huge page or more begins where heap->colors have room. Its owner may let it begin
 * later in its first page (span->offset), before another thread knows the block.
 */
void *heap_take_large(struct heap *heap, size_t pages, size_t align_pages, enum run_choice choice,
                      bool colored, bool *zero);

/* Counts a new block as one of memory that may be resident, though nothing tells that it will be touched,
 * until it is freed or resized. */
void heap_note_guess(struct heap *heap, struct span *span);

/* Frees a block, or records the misuse. Returns NULL, or a span of pages that were moved or marked, which is
 * out of the heap: the caller renews its range (vm_renew), and gives it back by heap_put_renewed. */
struct span *heap_put_large(struct heap *heap, void *block);
void heap_put_renewed(struct heap *heap, struct span *span, enum vm_renewed renewed);

/* The span of a large block in use that begins at block; NULL if there is none. Any thread. */
struct span *heap_large_span(const struct heap *heap, const void *block);

/* The same by any address on its first page. */
struct span *heap_large_span_at(const struct heap *heap, const void *address);

/* Gives a large block's span so many pages in place. False, and nothing changed, if that cannot be. */
bool heap_resize_large(struct heap *heap, struct span *span, size_t pages);

/* from's pages were moved to to by vm_move_pages: from is free, and clean. */
void heap_moved(struct heap *heap, struct span *from, struct span *to);

/* Whether one more block may be moved: each costs the process a mapping. */
bool heap_may_move(const struct heap *heap);

#endif
