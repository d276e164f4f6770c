/*
 * The memory layout of glibc's malloc: arena, heap header and chunk. Names follow glibc's malloc.c and
 * arena.c.
 *
 * None of this is an interface, so the layout is chosen by glibc's version and verified on the live process
 * before it is used (glibc_proof.h). malloc_state has the same fields in every version; heap_info gained one
 * in 2.35.
 */
#ifndef PTLBMALLOC2_GLIBC_LAYOUT_H
#define PTLBMALLOC2_GLIBC_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

_Static_assert(sizeof(size_t) == 8, "the layouts below are those of 64-bit glibc");

#define CHUNK_HEADER_BYTES   16UL
#define CHUNK_MIN_BYTES      32UL /* MINSIZE */
#define CHUNK_ALIGN_MASK     15UL
#define CHUNK_PREV_INUSE     1UL
#define CHUNK_IS_MMAPPED     2UL
#define CHUNK_NON_MAIN_ARENA 4UL
#define CHUNK_FLAGS          7UL

#define HEAP_MAX_BYTES             (64UL << 20) /* HEAP_MAX_SIZE; heaps are aligned to it */
#define ARENA_BINS                 127          /* NBINS - 1 */
#define DEFAULT_MMAP_THRESHOLD     (128UL << 10)
#define DEFAULT_MMAP_THRESHOLD_MAX (32UL << 20)
#define DEFAULT_TRIM_THRESHOLD     (128UL << 10)
#define DEFAULT_TOP_PAD            (128UL << 10)

struct chunk {
    size_t prev_size; /* part of the preceding block while that is in use */
    size_t size_flags;
};

/* The start of struct malloc_state; its address identifies the arena. */
struct arena {
    _Atomic(int) mutex; /* glibc's low-level lock: 0: free, 1: held, 2: held, and threads wait */
    int flags;
};

/* The rest, behind the fastbins, if the version has any. The arena's mutex guards all fields but `next`. */
struct arena_body {
    struct chunk *top;
    struct chunk *last_remainder;
    void *bins[2 * ARENA_BINS];
    unsigned binmap[4];
    struct arena *next; /* the ring of all arenas, in the order in which fork locks them; only grows */
    struct arena *next_free;
    size_t attached_threads;
    size_t system_mem;
    size_t max_system_mem;
};
_Static_assert(offsetof(struct arena_body, next) == 2064, "malloc_state");
_Static_assert(offsetof(struct arena_body, system_mem) == 2088, "malloc_state");

/* struct heap_info. */
struct heap {
    struct arena *arena;
    struct heap *prev;
    size_t size;          /* available to the arena */
    size_t mprotect_size; /* readable and writable; at least `size` */
    size_t pagesize;      /* only if heap_header_bytes is HEAP_HEADER_WITH_PAGESIZE */
};

#define HEAP_HEADER_WITH_PAGESIZE 48UL

/* What differs between versions. Written at start-up only. */
struct glibc_layout {
    const char *version;           /* as gnu_get_libc_version() returns it */
    size_t body_offset;            /* of struct arena_body in malloc_state */
    size_t heap_header_bytes;      /* sizeof (heap_info): the offset of a heap's first chunk, or its arena */
    size_t mmapped_overhead_bytes; /* the part of an mmapped chunk's size that the program may not use */
};

extern struct glibc_layout glibc_layout;

/* Sets glibc_layout. False for an unknown version; then only mmapped_overhead_bytes may be relied on. */
bool glibc_layout_choose(const char *version);

/* The main arena, where the ring through all arenas starts. NULL until it is proved (glibc_proof.h). */
extern struct arena *glibc_main_arena;

static inline struct arena_body *arena_body(const struct arena *arena) {
    return (struct arena_body *)((char *)arena + glibc_layout.body_offset);
}

/* The next arena in the ring. Needs no lock. */
static inline struct arena *arena_next(const struct arena *arena) {
    return __atomic_load_n((struct arena **)&arena_body(arena)->next, __ATOMIC_ACQUIRE);
}

/* The same for loops that start with the main arena: NULL after the last one. */
static inline struct arena *arena_after(const struct arena *arena) {
    struct arena *next = arena_next(arena);
    return next == glibc_main_arena ? NULL : next;
}

static inline struct chunk *chunk_of_block(const void *block) {
    return (struct chunk *)((char *)block - CHUNK_HEADER_BYTES);
}

static inline size_t chunk_bytes(const struct chunk *chunk) {
    return chunk->size_flags & ~CHUNK_FLAGS;
}

static inline bool block_is_mmapped(const void *block) {
    return (chunk_of_block(block)->size_flags & CHUNK_IS_MMAPPED) != 0;
}

/* A block in an arena may use the next chunk's prev_size; an mmapped one has no next. */
static inline size_t block_usable_bytes(const void *block) {
    return chunk_bytes(chunk_of_block(block)) -
           (block_is_mmapped(block) ? glibc_layout.mmapped_overhead_bytes : sizeof(size_t));
}

static inline struct heap *heap_of(const void *address) {
    return (struct heap *)((uintptr_t)address & ~(HEAP_MAX_BYTES - 1));
}

#endif
