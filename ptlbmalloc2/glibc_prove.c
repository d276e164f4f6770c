#include "glibc_prove.h"

#include <errno.h>
#include <link.h>
#include <malloc.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "glibc_malloc.h"
#include "os/filters.h"

#define RING_LIMIT                                                                                \
    (1UL << 20)       /* more arenas than a process can have threads: a ring that long is no ring \
                       */
#define PROVE_TRIES 8 /* mallinfo and the walk are not one snapshot where other threads run already */

struct segment {
    uintptr_t inside; /* an address within the object looked for */
    uintptr_t start, end;
};

static int find_data_segment(struct dl_phdr_info *info, size_t info_bytes, void *opaque) {
    (void)info_bytes;
    struct segment *wanted = opaque;
    struct segment data = {0};
    bool ours = false;
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_LOAD) {
            continue;
        }
        uintptr_t start = info->dlpi_addr + header->p_vaddr;
        uintptr_t end = start + header->p_memsz;
        ours |= wanted->inside >= start && wanted->inside < end;
        if ((header->p_flags & PF_W) != 0) {
            data.start = start;
            data.end = end;
        }
    }
    if (ours) {
        wanted->start = data.start;
        wanted->end = data.end;
    }
    return ours;
}

/* An empty bin's list points at the bin itself, as if the two links were the end of a chunk that starts
 * before. */
static unsigned count_empty_bins(const struct arena *arena) {
    unsigned empty = 0;
    for (unsigned i = 0; i < ARENA_BINS; i++) {
        const void *self = (const char *)&arena_body(arena)->bins[(size_t)2 * i] - CHUNK_HEADER_BYTES;
        empty += arena_body(arena)->bins[(size_t)2 * i] == self &&
                 arena_body(arena)->bins[(size_t)2 * i + 1] == self;
    }
    return empty;
}

bool glibc_is_mapped(const void *address) {
    unsigned char resident;
    uintptr_t page = (uintptr_t)address & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
    int saved_errno = errno;
    bool mapped = filters_now() != FILTERS_ADDED && mincore((void *)page, 1, &resident) == 0;
    errno = saved_errno;
    return mapped;
}

static bool heap_is_sane(const struct heap *heap, const struct glibc_layout *layout) {
    size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    size_t page_mask = page_bytes - 1;
    /* A heap of huge pages is cut by those: we cut by pages. */
    if (layout->heap_header_bytes == HEAP_HEADER_WITH_PAGESIZE && heap->pagesize != page_bytes) {
        return false;
    }
    return heap->size <= heap->mprotect_size && heap->mprotect_size <= HEAP_MAX_BYTES && heap->size > 0 &&
           ((heap->size | heap->mprotect_size) & page_mask) == 0;
}

bool glibc_prove_arena(const struct arena *arena, const struct glibc_layout *layout) {
    const struct chunk *top = arena_body(arena)->top;
    const struct heap *heap = heap_of(top);
    if (!glibc_is_mapped(heap) || (const char *)top + chunk_bytes(top) != (const char *)heap + heap->size ||
        (top->size_flags & CHUNK_FLAGS) != CHUNK_PREV_INUSE) {
        return false;
    }
    size_t total = 0;
    for (size_t heaps = 0; heaps < RING_LIMIT; heaps++) {
        if (heap->arena != arena || !heap_is_sane(heap, layout)) {
            return false;
        }
        total += heap->size;
        if (heap->prev == NULL) {
            return (const char *)arena == (const char *)heap + layout->heap_header_bytes &&
                   total == arena_body(arena)->system_mem && total <= arena_body(arena)->max_system_mem;
        }
        heap = heap->prev;
        if (heap_of(heap) != heap || !glibc_is_mapped(heap)) {
            return false;
        }
    }
    return false;
}

bool glibc_prove_heap_of_block(const void *block, struct arena *main_arena) {
    const struct heap *heap = heap_of(block);
    if (!glibc_is_mapped(heap)) {
        return false;
    }
    struct arena *arena = main_arena;
    for (size_t i = 0; i < RING_LIMIT; i++) {
        arena = arena_next(arena);
        if (arena == main_arena) {
            return false;
        }
        if (arena == heap->arena) {
            return true;
        }
    }
    return false;
}

/* Follows the ring from a candidate; every other member must be where heaps keep theirs. False if it is no
 * ring. */
static bool add_up_ring(struct arena *main_arena, const struct glibc_layout *layout, size_t *system_mem) {
    *system_mem = arena_body(main_arena)->system_mem;
    struct arena *arena = arena_next(main_arena);
    for (size_t i = 0; i < RING_LIMIT; i++) {
        if (arena == main_arena) {
            return true;
        }
        const struct heap *heap = heap_of(arena);
        /* A wrong candidate leads anywhere: only an address that an arena could have is read. */
        if ((const char *)arena != (const char *)heap + layout->heap_header_bytes || !glibc_is_mapped(heap) ||
            heap->arena != arena) {
            return false;
        }
        *system_mem += arena_body(arena)->system_mem;
        arena = arena_next(arena);
    }
    return false;
}

/* mallinfo(3) is there in every version. Its figures are ints: compared as such, they are right modulo 2^32.
 */
static bool agrees_with_mallinfo(struct arena *candidate, const struct glibc_layout *layout) {
    for (int i = 0; i < PROVE_TRIES; i++) {
        size_t system_mem = 0;
        if (!add_up_ring(candidate, layout, &system_mem) || !glibc_is_mapped(arena_body(candidate)->top)) {
            return false;
        }
        struct mallinfo info = __libc_mallinfo();
        if (info.arena == (int)system_mem && info.keepcost == (int)chunk_bytes(arena_body(candidate)->top) &&
            arena_body(candidate)->system_mem <= arena_body(candidate)->max_system_mem) {
            return true;
        }
    }
    return false;
}

struct arena *glibc_prove_main_arena(const struct glibc_layout *layout, const char **why) {
    /* A block larger than the thread cache takes, so that the main arena is initialized and has a top. */
    void *block = __libc_malloc(4096);
    if (block == NULL) {
        *why = "no memory";
        return NULL;
    }
    __libc_free(block);

    size_t arena_bytes = glibc_arena_body_offset + sizeof(struct arena_body);
    struct segment data = {.inside = (uintptr_t)&__libc_malloc};
    dl_iterate_phdr(find_data_segment, &data);
    if (data.end < arena_bytes) {
        *why = "libc's data segment was not found";
        return NULL;
    }
    *why = "the main arena was not found";
    for (uintptr_t at = data.start; at <= data.end - arena_bytes; at += sizeof(void *)) {
        /*
         * Most of the 127 bins are empty this early, and nothing else in libc's data looks like that. A place
         * a few bins before or after the true one does: mallinfo tells which is right.
         */
        struct arena *candidate = (struct arena *)at;
        if (count_empty_bins(candidate) > ARENA_BINS / 2) {
            if (agrees_with_mallinfo(candidate, layout)) {
                return candidate;
            }
            *why = "no main arena agrees with mallinfo";
        }
    }
    return NULL;
}
