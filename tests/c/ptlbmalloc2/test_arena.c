/* The arithmetic on one arena, on a heap made by hand: claims, huge-page boundaries, excess, cuts. */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "arena.h"
#include "check.h"
#include "os/vm.h"

#define PAGE     vm_page_size()
#define HUGE     (2UL << 20)
#define SOME     (HUGE / 8) /* whole pages of any size */
#define MIB      (1UL << 20)
#define KEEP_ALL (1UL << 30)

/* A heap of the given size, of which so much is usable, with one arena in it and the rest of `size` in its
 * top. */
static struct arena *make_arena(struct heap *heap, size_t size, size_t usable) {
    CHECK(mprotect(heap, HEAP_MAX_BYTES, PROT_NONE) == 0);
    CHECK(mprotect(heap, usable, PROT_READ | PROT_WRITE) == 0);
    memset(heap, 0, PAGE);
    struct arena *arena = (struct arena *)((char *)heap + 48);
    heap->arena = arena;
    heap->size = size;
    heap->mprotect_size = usable;
    struct arena_body *body = arena_body(arena);
    body->top = (struct chunk *)((char *)heap + PAGE - CHUNK_HEADER_BYTES);
    body->top->size_flags = (size - PAGE + CHUNK_HEADER_BYTES) | CHUNK_PREV_INUSE;
    body->system_mem = body->max_system_mem = size;
    return arena;
}

static struct heap *map_heap(void) {
    char *space =
        mmap(NULL, 2 * HEAP_MAX_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(space != MAP_FAILED);
    return heap_of(space + HEAP_MAX_BYTES - 1);
}

static void test_claims(struct heap *heap) {
    struct arena *arena = make_arena(heap, 64 * PAGE, 64 * PAGE);
    size_t usable = arena_usable_bytes(arena);
    CHECK(arena_claim(arena, usable, 0) == 0);
    CHECK(arena_claim(arena, usable + 1, 0) == PAGE);
    CHECK(heap->mprotect_size == 65 * PAGE && heap->size == 64 * PAGE);
    ((char *)heap)[65 * PAGE - 1] = 1; /* is writable */
    size_t more = 256 * PAGE;
    CHECK(arena_claim(arena, more, 0) > 0);
    CHECK(arena_usable_bytes(arena) >= more && arena_usable_bytes(arena) < more + PAGE);
}

static void test_claims_end_with_the_heap(struct heap *heap) {
    for (size_t huge = 0; huge <= HUGE; huge += HUGE) {
        struct arena *arena = make_arena(heap, 64 * PAGE, HEAP_MAX_BYTES - 3 * PAGE);
        arena_claim(arena, KEEP_ALL, huge);
        CHECK(heap->mprotect_size == HEAP_MAX_BYTES - (huge > 0 ? PAGE : 0));
        arena = make_arena(heap, HEAP_MAX_BYTES, HEAP_MAX_BYTES);
        /* Little enough that what lies behind the heap could be claimed by mistake. */
        CHECK(arena_claim(arena, arena_usable_bytes(arena) + MIB, huge) == 0);
        CHECK(heap->mprotect_size == HEAP_MAX_BYTES);
    }
}

/* No claim makes a huge page's place usable whole: its last page is left to glibc. */
static void test_claims_stop_short_of_huge_pages(struct heap *heap) {
    struct arena *arena = make_arena(heap, SOME, SOME);
    CHECK(arena_claim(arena, KEEP_ALL, HUGE) == HUGE - PAGE - SOME);
    CHECK(heap->mprotect_size == HUGE - PAGE);
    CHECK(arena_claim(arena, KEEP_ALL, HUGE) == 0);
    arena = make_arena(heap, SOME, HUGE);
    CHECK(arena_claim(arena, KEEP_ALL, HUGE) == HUGE - PAGE);
}

static void test_excess_and_cut(struct heap *heap) {
    struct arena *arena = make_arena(heap, 4 * MIB, 4 * MIB);
    size_t top = arena_top_bytes(arena);
    CHECK(arena_excess_bytes(arena, top) == 0);
    CHECK(arena_excess_bytes(arena, KEEP_ALL) == 0);
    size_t excess = arena_excess_bytes(arena, MIB);
    CHECK(excess % PAGE == 0 && excess > 0);
    CHECK(top - excess >= MIB + CHUNK_MIN_BYTES);
    CHECK(top - excess < MIB + CHUNK_MIN_BYTES + 2 * PAGE);
    /* With nothing to keep, the top's header still stays. */
    CHECK(top - arena_excess_bytes(arena, 0) >= CHUNK_MIN_BYTES);

    char *end = arena_top_end(arena);
    arena_cut_purged(arena, excess);
    CHECK(arena_top_end(arena) == end - excess);
    CHECK(arena_top_end(arena) == (char *)heap + heap->size);
    CHECK(arena_body(arena)->system_mem == heap->size);
    CHECK(heap->mprotect_size == 4 * MIB);
    CHECK((arena_body(arena)->top->size_flags & CHUNK_FLAGS) == CHUNK_PREV_INUSE);
}

static void test_lock(struct heap *heap) {
    struct arena *arena = make_arena(heap, MIB, MIB);
    CHECK(arena_trylock(arena));
    CHECK(!arena_trylock(arena));
    arena_unlock(arena);
    CHECK(arena_trylock(arena));
    arena->mutex = 2; /* a thread waits: unlocking wakes it, and frees the lock all the same */
    arena_unlock(arena);
    CHECK(arena_trylock(arena));
}

int main(void) {
    struct heap *heap = map_heap();
    test_claims(heap);
    test_claims_end_with_the_heap(heap);
    test_claims_stop_short_of_huge_pages(heap);
    test_excess_and_cut(heap);
    test_lock(heap);
    return 0;
}
