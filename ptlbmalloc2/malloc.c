/*
 * The malloc family as the program sees it: glibc's own, with a check of the arenas after every so many
 * bytes. Also the start and the end of the library.
 *
 * Each thread has two allowances, the bytes that it may allocate and free before its next check. Nearly every
 * call subtracts from one of them and jumps to glibc: no lock, no atomic operation, and no access to memory
 * other than the thread's own and, on free, the header that glibc is about to read, and for a large block the
 * address of the arena's top.
 *
 * The family is complete, so that no other allocator that the program may be linked with serves a part of it.
 */
#include <errno.h>
#include <malloc.h>
#include <stdlib.h>

#include "activation.h"
#include "api/sanitizer.h"
#include "base/size.h"
#include "glibc_layout.h"
#include "glibc_malloc.h"
#include "glibc_settings.h"
#include "governor.h"
#include "numbers.h"
#include "options.h"
#include "os/vm.h"
#include "placement.h"
#include "report.h"

#define EXPORT              __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect((condition), 0)
#define NOT_GOVERNED        SIZE_MAX

/* The largest chunk of glibc's thread cache, by default; only a larger one may change a top at once. */
#define THREAD_CACHE_MAX_BYTES 1040UL

/* Zero at first: a thread's first call of each kind checks, and so learns whether glibc is governed. */
static __thread struct allowance {
    size_t alloc_bytes;
    size_t free_bytes;
    size_t granted_free_bytes; /* at the last check */
    /*
     * With placement on, alloc_bytes never covers a block that glibc may map, so that the fast path needs no
     * comparison: this much of the thread's last grant is withheld.
     */
    size_t withheld_alloc_bytes;
} allowance __attribute__((tls_model("initial-exec")));

__attribute__((constructor(101))) static void start(void) {
    if (sanitizer_is_there()) {
        return; /* the sanitizer may not have started yet, and these functions would call it */
    }
    int saved_errno = errno;
    options_read();
    governor_start();
    placement_start();
    allowance = (struct allowance){0};
    if (options.verbose) {
        report_start();
    }
    errno = saved_errno;
}

__attribute__((destructor)) static void finish(void) {
    if (!sanitizer_is_there()) {
        int saved_errno = errno;
        report_stats();
        errno = saved_errno;
    }
}

/* Subtracts the bytes from an allowance, if it covers them. Correct for any size. */
static inline bool pay(size_t *left, size_t bytes) {
    size_t rest;
    if (__builtin_sub_overflow(*left, bytes, &rest)) {
        return false;
    }
    *left = rest;
    return true;
}

/* Returns what the thread may allocate or free, by the reason, before its next check. */
static size_t check(struct arena *arena, enum check_reason reason, size_t freed_bytes) {
    if (arena != NULL) {
        return governor_check(arena, reason, freed_bytes);
    }
    /* Check again soon before the start, and never if glibc is not governed. */
    return LOAD(&activation) == ACTIVATION_PENDING ? 0 : NOT_GOVERNED;
}

/* After a free, of a block of now_bytes if the allowance did not cover that. */
static void after_free(struct arena *arena, enum check_reason reason, size_t now_bytes) {
    size_t freed_bytes = allowance.granted_free_bytes - allowance.free_bytes + now_bytes;
    allowance.granted_free_bytes = check(arena, reason, freed_bytes);
    allowance.free_bytes = allowance.granted_free_bytes;
}

/* After an allocation that the allowance did not cover. Returns the block. */
__attribute__((noinline)) static void *after_allocation(void *block, size_t bytes) {
    size_t granted = allowance.alloc_bytes + allowance.withheld_alloc_bytes;
    if (allowance.withheld_alloc_bytes == 0 || !pay(&granted, bytes)) {
        bool in_arena = block != NULL && !block_is_mmapped(block);
        granted = in_arena ? check(governor_arena_of(block), CHECK_ALLOCATED, 0) : 0;
    }
    allowance.alloc_bytes = placement_is_on() ? size_min(granted, placement_min_bytes() - 1) : granted;
    allowance.withheld_alloc_bytes = granted - allowance.alloc_bytes;
    return block;
}

__attribute__((noinline)) static void *malloc_and_check(size_t bytes) {
    if (sanitizer_is_there()) {
        return __interceptor_malloc(bytes);
    }
    void *block = __libc_malloc(placement_request_bytes(bytes));
    return after_allocation(placement_place(block, bytes, 0), bytes);
}

__attribute__((noinline)) static void *calloc_and_check(size_t count, size_t bytes) {
    if (sanitizer_is_there()) {
        return __interceptor_calloc(count, bytes);
    }
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) {
        return __libc_calloc(count, bytes);
    }
    void *block = __libc_calloc(1, placement_request_bytes(total));
    return after_allocation(placement_place(block, total, 0), total);
}

__attribute__((noinline)) static void free_and_check(void *block) {
    if (block_is_mmapped(block)) {
        void *own = placement_original(block);
        governor_note_mmapped_free(chunk_bytes(chunk_of_block(own)));
        __libc_free(own);
        return;
    }
    /* Both before the free: the block's heap may vanish with it. */
    struct arena *arena = governor_arena_of(block);
    size_t bytes = chunk_bytes(chunk_of_block(block));
    __libc_free(block);
    after_free(arena, CHECK_FREED, bytes);
}

/* The arena's top. Never dereferenced: the top may move, or vanish with a heap, at any time. */
static inline uintptr_t top_of(const struct arena *arena) {
    return (uintptr_t)__atomic_load_n(&arena_body(arena)->top, __ATOMIC_RELAXED);
}

/* Whether the top grew by much, or moved back to an earlier heap, as the later ones were entirely free. */
static inline bool has_merged(uintptr_t before, uintptr_t after) {
    return (intptr_t)(before - after) >= (intptr_t)GOVERNOR_MERGE_BYTES || (before ^ after) >= HEAP_MAX_BYTES;
}

/*
 * A block that the thread cache does not take may merge with everything that was freed before it, however
 * small it is: a heap freed in random order becomes free with its last blocks. A process that then falls idle
 * would make no further check.
 */
__attribute__((noinline)) static void free_and_watch_top(void *block, size_t size_flags) {
    struct arena *arena = LOAD(&governed.main_arena);
    if ((size_flags & CHUNK_NON_MAIN_ARENA) != 0) {
        if (UNLIKELY(!LOAD(&governed.heaps_proved))) {
            __libc_free(block);
            return;
        }
        arena = heap_of(block)->arena;
    }
    uintptr_t before = top_of(arena);
    __libc_free(block);
    if (UNLIKELY(has_merged(before, top_of(arena)))) {
        after_free(arena, CHECK_MERGED, 0);
    }
}

/* Pays for at least one byte: where the library does not start, the allowance covers no call. */
EXPORT void *malloc(size_t bytes) {
    if (UNLIKELY(!pay(&allowance.alloc_bytes, bytes | 1))) {
        return malloc_and_check(bytes);
    }
    return __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes) {
    /* If the product overflows, a wrong sum is paid, and glibc refuses the call. */
    if (UNLIKELY(!pay(&allowance.alloc_bytes, (count * bytes) | 1))) {
        return calloc_and_check(count, bytes);
    }
    return __libc_calloc(count, bytes);
}

EXPORT void free(void *block) {
    if (UNLIKELY(block == NULL)) {
        return;
    }
    if (UNLIKELY(sanitizer_is_there())) {
        __interceptor_free(block);
        return;
    }
    size_t size_flags = chunk_of_block(block)->size_flags;
    /* The flags in the size's low bits cost at most 7 bytes of allowance: not worth an instruction. */
    if (UNLIKELY((size_flags & CHUNK_IS_MMAPPED) != 0) || UNLIKELY(!pay(&allowance.free_bytes, size_flags))) {
        free_and_check(block);
        return;
    }
    if (size_flags > THREAD_CACHE_MAX_BYTES) {
        free_and_watch_top(block, size_flags);
        return;
    }
    __libc_free(block);
}

/* After an allocation by a function that is rarely called. */
static void *allocated(void *block, size_t bytes) {
    return pay(&allowance.alloc_bytes, bytes) ? block : after_allocation(block, bytes);
}

/* A placed block keeps its shift: its mapping is resized, or all of it is copied. */
__attribute__((noinline)) static void *realloc_mmapped(void *block, size_t bytes) {
    void *own = placement_original(block);
    size_t shift = (size_t)((char *)block - (char *)own);
    size_t kept = size_min(block_usable_bytes(block), bytes);
    /* A size of 0, which frees the block, and too large a size are left to glibc. */
    void *moved = __libc_realloc(own, bytes == 0 || bytes > PTRDIFF_MAX ? bytes : bytes + shift);
    return allocated(placement_restore(moved, shift, kept), bytes);
}

EXPORT void *realloc(void *block, size_t bytes) {
    if (block == NULL) {
        return malloc(bytes);
    }
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_realloc(block, bytes);
    }
    if (block_is_mmapped(block)) {
        return realloc_mmapped(block, bytes);
    }
    size_t old_bytes = chunk_bytes(chunk_of_block(block));
    struct arena *old_arena = governor_arena_of(block);
    void *moved = __libc_realloc(block, bytes);
    if (UNLIKELY(!pay(&allowance.free_bytes, old_bytes)) && old_arena != NULL) {
        after_free(old_arena, CHECK_FREED, old_bytes);
    }
    if (UNLIKELY(!pay(&allowance.alloc_bytes, bytes))) {
        size_t kept = size_min(old_bytes - sizeof(size_t), bytes);
        return after_allocation(placement_place(moved, bytes, kept), bytes);
    }
    return moved;
}

EXPORT void *reallocarray(void *block, size_t count, size_t bytes) {
    size_t total;
    return realloc(block, __builtin_mul_overflow(count, bytes, &total) ? SIZE_MAX : total);
}

EXPORT void *memalign(size_t alignment, size_t bytes) {
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_memalign(alignment, bytes);
    }
    return allocated(__libc_memalign(alignment, bytes), bytes);
}

/* As lenient as glibc before 2.38: an alignment that is no power of two is rounded up. */
EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
    return memalign(alignment, bytes);
}

EXPORT int posix_memalign(void **out, size_t alignment, size_t bytes) {
    if (alignment < sizeof(void *) || (alignment & (alignment - 1)) != 0) {
        return EINVAL;
    }
    int saved_errno = errno;
    void *block = memalign(alignment, bytes);
    errno = saved_errno;
    if (block == NULL) {
        return ENOMEM;
    }
    *out = block;
    return 0;
}

EXPORT void *valloc(size_t bytes) {
    return memalign(vm_page_size(), bytes);
}

EXPORT void *pvalloc(size_t bytes) {
    return memalign(vm_page_size(), bytes > PTRDIFF_MAX ? bytes : vm_round_up(size_max(bytes, 1)));
}

EXPORT size_t malloc_usable_size(void *block) {
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_malloc_usable_size(block);
    }
    return block == NULL ? 0 : block_usable_bytes(block);
}

EXPORT int mallopt(int parameter, int value) {
    glibc_settings_note(parameter, (size_t)value);
    int done = __libc_mallopt(parameter, value);
    if (parameter == M_MMAP_THRESHOLD && done == 1) {
        STORE(&glibc_settings.mmap_threshold_bytes, (size_t)value);
    }
    return done;
}
