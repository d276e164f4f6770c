#include "arena.h"

#include <linux/futex.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/size.h"
#include "os/syscall.h"
#include "os/vm.h"

bool arena_trylock(struct arena *arena) {
    int expected = 0;
    return atomic_compare_exchange_strong_explicit(&arena->mutex, &expected, 1, memory_order_acquire,
                                                   memory_order_relaxed);
}

void arena_unlock(struct arena *arena) {
    if (atomic_exchange_explicit(&arena->mutex, 0, memory_order_release) > 1) {
        os_syscall(SYS_futex, (long)&arena->mutex, FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
    }
}

size_t arena_usable_bytes(const struct arena *arena) {
    const struct heap *heap = heap_of(arena_body(arena)->top);
    return arena_top_bytes(arena) + heap->mprotect_size - heap->size;
}

size_t arena_claim(const struct arena *arena, size_t wanted_bytes, size_t huge_page_bytes) {
    struct heap *heap = heap_of(arena_body(arena)->top);
    size_t usable = arena_usable_bytes(arena);
    if (usable >= wanted_bytes) {
        return 0;
    }
    size_t claim = vm_round_up(wanted_bytes - usable);
    size_t room = HEAP_MAX_BYTES - heap->mprotect_size;
    if (huge_page_bytes > 0) {
        size_t to_huge_end = huge_page_bytes - (heap->mprotect_size & (huge_page_bytes - 1));
        room = size_minus(size_min(room, to_huge_end), vm_page_size());
    }
    claim = size_min(claim, room);
    if (claim == 0 || mprotect((char *)heap + heap->mprotect_size, claim, PROT_READ | PROT_WRITE) != 0) {
        return 0;
    }
    heap->mprotect_size += claim;
    return claim;
}

size_t arena_trimmable_bytes(const struct arena *arena) {
    /* If the program moved the break, or the top is in an mmap, glibc does not trim it either. */
    return arena == glibc_main_arena && (char *)sbrk(0) != arena_top_end(arena) ? 0 : arena_top_bytes(arena);
}

size_t arena_excess_bytes(const struct arena *arena, size_t keep_bytes) {
    size_t excess = size_minus(arena_trimmable_bytes(arena), CHUNK_MIN_BYTES + 1 + keep_bytes);
    return excess & ~(vm_page_size() - 1);
}

/* The last step of a cut. */
static void shrink_top(struct arena *arena, size_t bytes) {
    arena_body(arena)->system_mem -= bytes;
    arena_body(arena)->top->size_flags = (arena_top_bytes(arena) - bytes) | CHUNK_PREV_INUSE;
}

void arena_cut_purged(struct arena *arena, size_t bytes) {
    heap_of(arena_body(arena)->top)->size -= bytes;
    shrink_top(arena, bytes);
}

size_t arena_release_main(size_t bytes) {
    char *end = arena_top_end(glibc_main_arena);
    sbrk(-(intptr_t)bytes);
    const char *now = sbrk(0);
    if ((intptr_t)now == -1 || now >= end) {
        return 0;
    }
    shrink_top(glibc_main_arena, (size_t)(end - now));
    return (size_t)(end - now);
}
