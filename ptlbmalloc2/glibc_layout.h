/*
 * What glibc's malloc looks like inside: the arena, the heap header, the chunk.
 *
 * None of this is an interface, so it is known for each version by name, and proved on the live process
 * before it is used (glibc_prove.h). malloc_state is the same in every version ; heap_info
 * gained a field in 2.35. Field names follow glibc's malloc.c and arena.c, so that the two can be read side
 * by side.
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
    size_t prev_size; /* belongs to the block before, where that is in use */
    size_t size_flags;
};

/* struct malloc_state: its start, and an arena's identity. */
struct arena {
    _Atomic(int) mutex; /* glibc's low-level lock: 0 free, 1 held, 2 held and waited for */
    int flags;
};

/* The rest, behind the fastbins, where there are any. Everything but `next` is guarded by the arena's mutex.
 */
struct arena_body {
    struct chunk *top;
    struct chunk *last_remainder;
    void *bins[2 * ARENA_BINS];
    unsigned binmap[4];
    struct arena *next; /* a ring through all arenas, in the order in which fork locks them; only grows */
    struct arena *next_free;
    size_t attached_threads;
    size_t system_mem;
    size_t max_system_mem;
};
_Static_assert(offsetof(struct arena_body, next) == 2064, "malloc_state");
_Static_assert(offsetof(struct arena_body, system_mem) == 2088, "malloc_state");

/* struct heap_info, as far as all versions agree. */
struct heap {
    struct arena *arena;
    struct heap *prev;
    size_t size;          /* what the arena may hand out */
    size_t mprotect_size; /* readable and writable; at least `size` */
    size_t pagesize;      /* its granule; only where heap_header_bytes is HEAP_HEADER_WITH_PAGESIZE */
};

#define HEAP_HEADER_WITH_PAGESIZE 48UL

struct glibc_layout {
    const char *version;           /* as gnu_get_libc_version() gives it */
    size_t body_offset;            /* of struct arena_body in malloc_state */
    size_t heap_header_bytes;      /* sizeof (heap_info): where a heap's first chunk, or its arena, starts */
    size_t mmapped_overhead_bytes; /* of an mmapped chunk\'s size, what the program may not use */
};

/* The layout of the running glibc; NULL where that version is not known. Sets glibc_arena_body_offset. */
const struct glibc_layout *glibc_layout_choose(const char *version);

extern size_t glibc_arena_body_offset;
extern size_t glibc_mmapped_overhead_bytes; /* of a version not known: the newest known one's */

static inline struct arena_body *arena_body(const struct arena *arena) {
    return (struct arena_body *)((char *)arena + glibc_arena_body_offset);
}

/* The next arena in the ring. Needs no lock. */
static inline struct arena *arena_next(const struct arena *arena) {
    return __atomic_load_n((struct arena **)&arena_body(arena)->next, __ATOMIC_ACQUIRE);
}

static inline struct chunk *chunk_of_block(const void *block) {
    return (struct chunk *)((char *)block - CHUNK_HEADER_BYTES);
}

static inline size_t chunk_bytes(const struct chunk *chunk) {
    return chunk->size_flags & ~CHUNK_FLAGS;
}

static inline struct heap *heap_of(const void *address) {
    return (struct heap *)((uintptr_t)address & ~(HEAP_MAX_BYTES - 1));
}

#endif
