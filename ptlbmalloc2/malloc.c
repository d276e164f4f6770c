/*
 * The malloc family as the program sees it: glibc's own, with a check of the arenas after every so many
 * bytes. Also the start and the end of the library.
 *
 * Each thread has two allowances, the bytes that it may allocate and free before its next check. Nearly every
 * call adds to one count and jumps to glibc: no lock, no atomic operation, and no access to memory other than
 * the thread's own and, on free, the header that glibc is about to read. Only for a block of more than 1,000
 * bytes, free also looks at the address of the arena's top: glibc's thread cache takes up to 1,032.
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
#include "os/libc.h"
#include "os/vm.h"
#include "placement.h"
#include "report.h"

#define EXPORT              __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect((condition), 0)

/* Where in a line of the instruction cache a function starts decides how fast it is: up to a fifth of the
 * time of a pair of malloc and free. */
#define FAST_PATH EXPORT __attribute__((aligned(64)))

/* Bits in the header of a block that is mmapped, however small it was resized to, or of at least 1 KiB with
 * its header. Two comparisons would cost seven instructions. */
#define LOOKS_AT_TOP (CHUNK_IS_MMAPPED | ~1023UL)

/*
 * The bytes that the thread allocates and frees. Each count starts so far below zero that it wraps around
 * when the allowance is used up: one instruction adds and tests. At first nothing is allowed: a thread's
 * first call of each kind checks, and so learns whether glibc is governed.
 */
static __thread struct counts {
    size_t allocated;
    size_t freed;
    size_t granted_free_bytes; /* at the last check */
} counts __attribute__((tls_model("initial-exec"))) = {SIZE_MAX, SIZE_MAX, 0};

/* Whether a check is due. */
static inline bool count(size_t *counted, size_t bytes) {
    *counted += bytes;
    return UNLIKELY(*counted < bytes);
}

/*
 * Counts at least one byte, so that the allowance covers no call where the library does not start.
 * SIZE_MAX, and a product of calloc that overflows, are counted wrongly: glibc refuses these calls.
 */
static inline bool count_allocated(size_t bytes) {
    return count(&counts.allocated, bytes + 1);
}

__attribute__((constructor(101))) static void start(void) {
    if (sanitizer_is_there()) {
        return; /* the sanitizer may not have started yet, and these functions would call it */
    }
    int saved_errno = errno;
    ptlbmalloc2_options_read();
    governor_start();
    placement_start();
    counts = (struct counts){SIZE_MAX, SIZE_MAX, 0};
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

__attribute__((noinline)) static void check_after_free(struct arena *arena, enum check_reason reason) {
    size_t freed_bytes = counts.freed + counts.granted_free_bytes + 1;
    counts.granted_free_bytes = governor_check(arena, reason, freed_bytes);
    counts.freed = ~counts.granted_free_bytes;
}

/*
 * Returns the block. With placement on, no allowance covers a block that glibc may map: the fast path needs
 * no comparison for these.
 */
__attribute__((noinline)) static void *check_after_allocation(void *block) {
    bool in_arena = block != NULL && !block_is_mmapped(block);
    size_t granted = in_arena ? governor_check(governor_arena_of(block), CHECK_ALLOCATED, 0) : 0;
    counts.allocated = ~(placement_is_on() ? size_min(granted, placement_min_bytes() - 1) : granted);
    return block;
}

/* Whether the call is a sanitizer's, as is the thread's next one. */
static bool is_for_sanitizer(void) {
    counts.allocated = SIZE_MAX;
    return sanitizer_is_there();
}

__attribute__((noinline)) static void *malloc_and_check(size_t bytes) {
    if (is_for_sanitizer()) {
        return __interceptor_malloc(bytes);
    }
    void *block = __libc_malloc(placement_request_bytes(bytes));
    return check_after_allocation(placement_place(block, bytes, 0));
}

__attribute__((noinline)) static void *calloc_and_check(size_t number, size_t bytes) {
    if (is_for_sanitizer()) {
        return __interceptor_calloc(number, bytes);
    }
    size_t total;
    if (__builtin_mul_overflow(number, bytes, &total)) {
        return __libc_calloc(number, bytes);
    }
    void *block = __libc_calloc(1, placement_request_bytes(total));
    governor_note_calloc(block, total);
    return check_after_allocation(placement_place(block, total, 0));
}

/* The arena's top. Never dereferenced: the top may move, or vanish with a heap, at any time. */
static inline uintptr_t top_of(const struct arena *arena) {
    return (uintptr_t)__atomic_load_n(&arena_body(arena)->top, __ATOMIC_RELAXED);
}

/* Whether the top grew by much, or moved back to an earlier heap, as the later ones were entirely free. */
static inline bool has_merged(uintptr_t before, uintptr_t after) {
    return (intptr_t)(before - after) >= (intptr_t)GOVERNOR_MERGE_BYTES || (before ^ after) >= HEAP_MAX_BYTES;
}

__attribute__((noinline)) static void free_mmapped(void *block) {
    void *own = placement_original(block);
    governor_note_mmapped_free(chunk_bytes(chunk_of_block(own)));
    __libc_free(own);
}

__attribute__((noinline)) static void free_and_check(void *block) {
    /* Before the free: the block's heap may vanish with it. */
    struct arena *arena = governor_arena_of(block);
    __libc_free(block);
    check_after_free(arena, CHECK_FREED);
}

/*
 * A block that the thread cache does not take may merge with everything that was freed before it, however
 * small it is: a heap freed in random order becomes free with its last blocks. A process that then falls idle
 * would make no further check.
 */
__attribute__((noinline)) static void free_and_watch_top(void *block) {
    struct arena *arena = governor_arena_of(block);
    uintptr_t before = top_of(arena);
    __libc_free(block);
    if (UNLIKELY(has_merged(before, top_of(arena)))) {
        check_after_free(arena, CHECK_MERGED);
    }
}

static inline void free_large(void *block, size_t header) {
    if ((header & CHUNK_IS_MMAPPED) != 0) {
        free_mmapped(block);
    } else if (count(&counts.freed, header)) {
        free_and_check(block);
    } else {
        free_and_watch_top(block);
    }
}

FAST_PATH void *malloc(size_t bytes) {
    return count_allocated(bytes) ? malloc_and_check(bytes) : __libc_malloc(bytes);
}

FAST_PATH void *calloc(size_t number, size_t bytes) {
    return count_allocated(number * bytes) ? calloc_and_check(number, bytes) : __libc_calloc(number, bytes);
}

FAST_PATH void free(void *block) {
    if (UNLIKELY(block == NULL)) {
        return;
    }
    if (UNLIKELY(sanitizer_is_there())) {
        __interceptor_free(block);
        return;
    }
    size_t header = chunk_of_block(block)->size_flags;
    if (UNLIKELY((header & LOOKS_AT_TOP) != 0)) {
        free_large(block, header);
        return;
    }
    /* The flags cost at most 7 bytes of allowance: not worth an instruction. */
    if (count(&counts.freed, header)) {
        free_and_check(block);
        return;
    }
    __libc_free(block);
}

/* After an allocation by a function that is rarely called. */
static void *allocated(void *block, size_t bytes) {
    return count_allocated(bytes) ? check_after_allocation(block) : block;
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

__attribute__((noinline)) static void *realloc_and_check(void *block, size_t bytes) {
    struct arena *arena = governor_arena_of(block); /* before its heap may vanish */
    size_t kept = size_min(block_usable_bytes(block), bytes);
    void *moved = __libc_realloc(block, bytes);
    check_after_free(arena, CHECK_FREED);
    return check_after_allocation(placement_place(moved, bytes, kept));
}

FAST_PATH void *realloc(void *block, size_t bytes) {
    if (block == NULL) {
        return malloc(bytes);
    }
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_realloc(block, bytes);
    }
    if (block_is_mmapped(block)) {
        return realloc_mmapped(block, bytes);
    }
    bool is_due = count(&counts.freed, chunk_bytes(chunk_of_block(block)));
    is_due |= count_allocated(bytes);
    return is_due ? realloc_and_check(block, bytes) : __libc_realloc(block, bytes);
}

EXPORT void *reallocarray(void *block, size_t number, size_t bytes) {
    size_t total;
    return realloc(block, __builtin_mul_overflow(number, bytes, &total) ? SIZE_MAX : total);
}

EXPORT void *memalign(size_t alignment, size_t bytes) {
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_memalign(alignment, bytes);
    }
    return allocated(__libc_memalign(alignment, bytes), bytes);
}

/* As glibc's own, which exports no other name for it. */
EXPORT void *aligned_alloc(size_t alignment, size_t bytes) {
    if (!is_power_of_two(alignment) && !libc_takes_odd_alignment(alignment)) {
        errno = EINVAL;
        return NULL;
    }
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
