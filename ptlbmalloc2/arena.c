#include "arena.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

bool arena_trylock(struct arena *arena) {
    int expected = 0;
    return atomic_compare_exchange_strong_explicit(&arena->mutex, &expected, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

void arena_unlock(struct arena *arena) {
    if (atomic_exchange_explicit(&arena->mutex, 0, memory_order_release) > 1) {
        syscall(SYS_futex, &arena->mutex, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
}

size_t arena_usable_bytes(const struct arena *arena) {
    const struct heap *heap = heap_of(arena_body(arena)->top);
    return arena_top_bytes(arena) + heap->mprotect_size - heap->size;
}

size_t arena_claim(const struct arena *arena, size_t wanted_bytes, size_t page_bytes,
                   size_t huge_page_bytes) {
    struct heap *heap = heap_of(arena_body(arena)->top);
    size_t usable = arena_usable_bytes(arena);
    if (usable >= wanted_bytes) {
        return 0;
    }
    size_t claim = (wanted_bytes - usable + page_bytes - 1) & ~(page_bytes - 1);
    size_t room = HEAP_MAX_BYTES - heap->mprotect_size;
    if (huge_page_bytes > 0) {
        size_t to_huge_end = huge_page_bytes - (heap->mprotect_size & (huge_page_bytes - 1));
        room = room < to_huge_end ? room : to_huge_end;
        room = room > page_bytes ? room - page_bytes : 0;
    }
    claim = claim < room ? claim : room;
    if (claim == 0 || mprotect((char *)heap + heap->mprotect_size, claim, PROT_READ | PROT_WRITE) != 0) {
        return 0;
    }
    heap->mprotect_size += claim;
    return claim;
}

size_t arena_trimmable_bytes(const struct arena *arena, bool is_main) {
    /* Somebody else moved the break, or the top lies in an mmap: glibc does not trim that either. */
    return is_main && (char *)sbrk(0) != arena_top_end(arena) ? 0 : arena_top_bytes(arena);
}

size_t arena_excess_bytes(const struct arena *arena, bool is_main, size_t keep_bytes, size_t page_bytes) {
    size_t top = arena_trimmable_bytes(arena, is_main);
    if (top <= CHUNK_MIN_BYTES + 1 + keep_bytes) {
        return 0;
    }
    return (top - CHUNK_MIN_BYTES - 1 - keep_bytes) & ~(page_bytes - 1);
}

static void set_top_bytes(const struct arena *arena, size_t bytes) {
    arena_body(arena)->top->size_flags = bytes | CHUNK_PREV_INUSE;
}

void arena_cut_purged(struct arena *arena, size_t bytes) {
    struct heap *heap = heap_of(arena_body(arena)->top);
    heap->size -= bytes;
    arena_body(arena)->system_mem -= bytes;
    set_top_bytes(arena, arena_top_bytes(arena) - bytes);
}

size_t arena_release_main(struct arena *main_arena, size_t bytes) {
    char *end = arena_top_end(main_arena);
    sbrk(-(intptr_t)bytes);
    const char *now = sbrk(0);
    if ((intptr_t)now == -1 || now >= end) {
        return 0;
    }
    size_t released = (size_t)(end - now);
    arena_body(main_arena)->system_mem -= released;
    set_top_bytes(main_arena, arena_top_bytes(main_arena) - released);
    return released;
}
