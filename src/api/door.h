/*
 * The way from the fast paths to a heap: under the heap's locks, or, in offload mode, to the server that owns
 * it; and, when that does not answer, to a second heap, which nobody owns.
 *
 * Threads that come this way carry out what another process asks (requests.h).
 *
 * Thread-safe; once the allocator is ready. NULL and 0 mean that memory is short.
 */
#ifndef CALM_API_DOOR_H
#define CALM_API_DOOR_H

#include "governor/governor.h"

#include <stdbool.h>
#include <stddef.h>

struct taken {
    size_t count;
    bool cacheable; /* a block that is not belongs to the second heap, and goes back there */
};

struct taken door_take_blocks(uint32_t class, void **blocks, size_t count);
void door_put_blocks(uint32_t class, void *const *blocks, size_t count);

/* zeroed: the caller needs zeros, and will have all of the block resident where that is little beside what is
 * used. */
void *door_take_large(size_t pages, size_t align_pages, bool zeroed, bool *zero);
void door_put_large(void *block);
void *door_resize_large(void *block, size_t pages);
size_t door_trim(size_t keep_bytes);
void door_refresh(void);
void door_limit_space(size_t bytes);

/* Runs look(subject) where it may read all there is to know of the heap, after what the caller freed. */
void door_look(void (*look)(void *subject), void *subject);

/* The heap that a block lies in, as far as its address tells; NULL if it is in none. */
struct heap *door_heap_of(const void *block);

/* Reports what a server came upon, to the thread that asks. */
void door_report_misuse(void);

#endif
