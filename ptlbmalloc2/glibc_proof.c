#include "glibc_proof.h"

#include <link.h>

#include "glibc_malloc.h"
#include "os/filters.h"
#include "os/syscall.h"
#include "os/vm.h"

/* No process has that many threads, and so arenas. A longer ring is none. */
#define MAX_RING (1UL << 20)

/* mallinfo and the walk are not one snapshot if other threads already run. */
#define PROOF_TRIES 8

struct segment {
    uintptr_t start, end;
};

/* For dl_iterate_phdr: stops at libc, and returns its writable segment in *opaque. */
static int find_data_segment(struct dl_phdr_info *info, size_t info_bytes, void *opaque) {
    (void)info_bytes;
    uintptr_t inside = (uintptr_t)&__libc_malloc;
    struct segment *data = opaque;
    bool is_libc = false;
    *data = (struct segment){0, 0};
    for (int i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_LOAD) {
            uintptr_t start = info->dlpi_addr + header->p_vaddr;
            struct segment segment = {start, start + header->p_memsz};
            is_libc |= inside >= segment.start && inside < segment.end;
            *data = (header->p_flags & PF_W) != 0 ? segment : *data;
        }
    }
    return is_libc;
}

/* The two links of an empty bin point at the bin itself, as if they were the end of a chunk's header. */
static unsigned count_empty_bins(const struct arena *arena) {
    unsigned empty = 0;
    for (size_t i = 0; i < ARENA_BINS; i++) {
        void *const *bin = &arena_body(arena)->bins[2 * i];
        const void *self = (const char *)bin - CHUNK_HEADER_BYTES;
        empty += bin[0] == self && bin[1] == self;
    }
    return empty;
}

bool glibc_is_mapped(const void *address) {
    unsigned char resident;
    uintptr_t page = (uintptr_t)address & ~((uintptr_t)vm_page_size() - 1);
    return filters_now() != FILTERS_ADDED && os_syscall(SYS_mincore, page, 1, &resident) == 0;
}

static bool heap_is_sane(const struct heap *heap) {
    /* A heap of huge pages is cut by those, but the library cuts by pages. */
    if (glibc_layout.heap_header_bytes == HEAP_HEADER_WITH_PAGESIZE && heap->pagesize != vm_page_size()) {
        return false;
    }
    return heap->size <= heap->mprotect_size && heap->mprotect_size <= HEAP_MAX_BYTES && heap->size > 0 &&
           ((heap->size | heap->mprotect_size) & (vm_page_size() - 1)) == 0;
}

bool glibc_prove_arena(const struct arena *arena) {
    const struct chunk *top = arena_body(arena)->top;
    const struct heap *heap = heap_of(top);
    if (!glibc_is_mapped(heap) || (const char *)top + chunk_bytes(top) != (const char *)heap + heap->size ||
        (top->size_flags & CHUNK_FLAGS) != CHUNK_PREV_INUSE) {
        return false;
    }
    size_t total = 0;
    for (size_t heaps = 0; heaps < MAX_RING; heaps++) {
        if (heap->arena != arena || !heap_is_sane(heap)) {
            return false;
        }
        total += heap->size;
        if (heap->prev == NULL) {
            return (const char *)arena == (const char *)heap + glibc_layout.heap_header_bytes &&
                   total == arena_body(arena)->system_mem && total <= arena_body(arena)->max_system_mem;
        }
        heap = heap->prev;
        if (heap_of(heap) != heap || !glibc_is_mapped(heap)) {
            return false;
        }
    }
    return false;
}

bool glibc_prove_heap_of_block(const void *block) {
    const struct heap *heap = heap_of(block);
    const struct arena *arena = glibc_is_mapped(heap) ? arena_after(glibc_main_arena) : NULL;
    for (size_t i = 0; arena != NULL && arena != heap->arena; i++) {
        arena = i < MAX_RING ? arena_after(arena) : NULL;
    }
    return arena != NULL;
}

/*
 * Follows the ring from a candidate for the main arena, and adds up what its members hold; all others must be
 * where heaps keep their arenas. False if it is no ring.
 */
static bool add_up_ring(const struct arena *candidate, size_t *system_mem) {
    *system_mem = arena_body(candidate)->system_mem;
    const struct arena *arena = arena_next(candidate);
    for (size_t i = 0; i < MAX_RING; i++) {
        if (arena == candidate) {
            return true;
        }
        const struct heap *heap = heap_of(arena);
        /* The links of a wrong candidate lead anywhere: only the address of a possible arena is read. */
        if ((const char *)arena != (const char *)heap + glibc_layout.heap_header_bytes ||
            !glibc_is_mapped(heap) || heap->arena != arena) {
            return false;
        }
        *system_mem += arena_body(arena)->system_mem;
        arena = arena_next(arena);
    }
    return false;
}

/* Every version has mallinfo(3). Its figures are ints, and correct modulo 2^32. */
static bool agrees_with_mallinfo(const struct arena *candidate) {
    const struct arena_body *body = arena_body(candidate);
    for (int i = 0; i < PROOF_TRIES; i++) {
        size_t system_mem = 0;
        if (!add_up_ring(candidate, &system_mem) || !glibc_is_mapped(body->top)) {
            return false;
        }
        struct mallinfo info = __libc_mallinfo();
        if (info.arena == (int)system_mem && info.keepcost == (int)chunk_bytes(body->top) &&
            body->system_mem <= body->max_system_mem) {
            return true;
        }
    }
    return false;
}

const char *glibc_prove_main_arena(void) {
    /* A block larger than the thread cache takes, so that the main arena is initialized and has a top. */
    void *block = __libc_malloc(4096);
    if (block == NULL) {
        return "no memory";
    }
    __libc_free(block);

    size_t arena_bytes = glibc_layout.body_offset + sizeof(struct arena_body);
    struct segment data = {0, 0};
    if (dl_iterate_phdr(find_data_segment, &data) == 0 || data.end < arena_bytes) {
        return "libc's data segment was not found";
    }
    const char *why_not = "the main arena was not found";
    for (uintptr_t at = data.start; at <= data.end - arena_bytes; at += sizeof(void *)) {
        /*
         * Most of the 127 bins are empty this early, and nothing else in libc's data looks like that, except
         * for an address a few bins before or after the right one. mallinfo tells which is right.
         */
        struct arena *candidate = (struct arena *)at;
        if (count_empty_bins(candidate) > ARENA_BINS / 2) {
            if (agrees_with_mallinfo(candidate)) {
                glibc_main_arena = candidate;
                return NULL;
            }
            why_not = "no main arena agrees with mallinfo";
        }
    }
    return why_not;
}
