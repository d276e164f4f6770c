/*
 * The malloc family as the program sees it: glibc's own, with a look at the arenas after every so many bytes.
 *
 * Each thread holds two allowances, bytes it may allocate and bytes it may free before its next look. Nearly
 * every call subtracts from one of them and jumps to glibc: no lock, no atomic, no memory but the thread's
 * own and, on free, the header that glibc is about to read, and for a large block where the arena's top is
 * afterwards.
 *
 * The family is complete, so that no other allocator that the program may be linked with serves a part of it.
 */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "api/sanitizer.h"
#include "glibc_layout.h"
#include "glibc_malloc.h"
#include "governor.h"
#include "placement.h"
#include "report.h"

#define EXPORT              __attribute__((visibility("default")))
#define UNLIKELY(condition) __builtin_expect((condition), 0)
#define NOT_GOVERNED        SIZE_MAX

/* The largest chunk that glibc's thread cache takes by default; only a larger one may change a top at once.
 */
#define THREAD_CACHE_MAX_BYTES 1040UL

/* Zero at first: a thread's first call of each kind looks, and so learns whether anything is governed at all.
 */
static __thread struct allowance allowance __attribute__((tls_model("initial-exec")));

static __thread size_t granted_free_bytes __attribute__((tls_model("initial-exec"))); /* at the last look */

static struct options options;

static size_t smaller(size_t a, size_t b) {
    return a < b ? a : b;
}

/* What the thread has freed since its last look, the block of now included. */
static size_t freed_since_look(size_t now_bytes) {
    return granted_free_bytes - allowance.free_bytes + now_bytes;
}

static void grant_free(size_t bytes) {
    granted_free_bytes = bytes;
    allowance.free_bytes = bytes;
}

__attribute__((constructor(101))) static void start(void) {
    if (sanitizer_is_there()) {
        return; /* which may not have begun yet, and has its functions called by these */
    }
    int saved_errno = errno;
    options_read(&options);
    governor_start(&options);
    placement_start(&options);
    allowance.alloc_bytes = 0;
    grant_free(0);
    if (options.verbose) {
        struct governor_stats stats = governor_read_stats();
        report_start(&stats, &options);
    }
    errno = saved_errno;
}

__attribute__((destructor)) static void finish(void) {
    if (sanitizer_is_there()) {
        return;
    }
    int saved_errno = errno;
    struct governor_stats stats = governor_read_stats();
    report_stats(&stats, &options);
    errno = saved_errno;
}

/* True, and pays, if the allowance covers the bytes. Unsigned with the borrow as the answer: no size is too
 * odd. */
static inline bool pay(size_t *left, size_t bytes) {
    size_t rest;
    if (__builtin_sub_overflow(*left, bytes, &rest)) {
        return false;
    }
    *left = rest;
    return true;
}

static struct allowance look_at(struct arena *arena, enum look_reason reason, size_t freed_bytes) {
    if (arena != NULL) {
        return governor_look(arena, reason, freed_bytes);
    }
    /* Before the start, look again soon; where the governor stays out, for ever after not. */
    size_t left = governor_is_unborn() ? 0 : NOT_GOVERNED;
    return (struct allowance){left, left};
}

static bool is_mmapped(const void *block) {
    return (chunk_of_block(block)->size_flags & CHUNK_IS_MMAPPED) != 0;
}

/* After an allocation for which the allowance was too small. */
__attribute__((noinline)) static void *after_allocation(void *block) {
    size_t granted = 0;
    if (block != NULL && !is_mmapped(block)) {
        granted = look_at(governor_arena_of(block), LOOK_ALLOCATED, 0).alloc_bytes;
    }
    allowance.alloc_bytes = granted;
    return block;
}

/*
 * Where blocks are placed, the allowance never covers one that glibc may map, so that no other call pays for
 * asking: this much of the thread's last grant is kept back.
 */
static __thread size_t withheld_alloc_bytes __attribute__((tls_model("initial-exec")));

/* The same where blocks are placed: the grant may cover what the allowance did not. */
__attribute__((noinline)) static void *after_placed(void *block, size_t bytes) {
    size_t granted = allowance.alloc_bytes + withheld_alloc_bytes;
    if (!pay(&granted, bytes)) {
        after_allocation(block);
        granted = allowance.alloc_bytes;
    }
    size_t most = placement_least_bytes() - 1;
    allowance.alloc_bytes = smaller(granted, most);
    withheld_alloc_bytes = granted - allowance.alloc_bytes;
    return block;
}

__attribute__((noinline)) static void *malloc_and_place(size_t bytes) {
    void *block = __libc_malloc(placement_ask(bytes));
    return after_placed(placement_place(block, bytes, 0), bytes);
}

__attribute__((noinline)) static void *calloc_and_place(size_t count, size_t bytes) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) {
        return __libc_calloc(count, bytes);
    }
    void *block = __libc_calloc(1, placement_ask(total));
    return after_placed(placement_place(block, total, 0), total);
}

__attribute__((noinline)) static void *malloc_and_look(size_t bytes) {
    if (sanitizer_is_there()) {
        return __interceptor_malloc(bytes);
    }
    if (UNLIKELY(placement_is_on())) {
        return malloc_and_place(bytes);
    }
    return after_allocation(__libc_malloc(bytes));
}

__attribute__((noinline)) static void *calloc_and_look(size_t count, size_t bytes) {
    if (sanitizer_is_there()) {
        return __interceptor_calloc(count, bytes);
    }
    if (UNLIKELY(placement_is_on())) {
        return calloc_and_place(count, bytes);
    }
    return after_allocation(__libc_calloc(count, bytes));
}

__attribute__((noinline)) static void free_and_look(void *block) {
    struct chunk *chunk = chunk_of_block(block);
    if (is_mmapped(block)) {
        void *own = placement_glibcs(block);
        governor_note_mmapped_free(chunk_bytes(chunk_of_block(own)));
        __libc_free(own);
        return;
    }
    /* Both before the free: the block's heap may vanish with it. */
    struct arena *arena = governor_arena_of(block);
    size_t freed_bytes = freed_since_look(chunk_bytes(chunk));
    __libc_free(block);
    grant_free(look_at(arena, LOOK_FREED, freed_bytes).free_bytes);
}

/* Where the arena's top starts. Compared, never followed: it may move, or vanish with a heap, at any time. */
static inline uintptr_t top_of(const struct arena *arena) {
    return (uintptr_t)__atomic_load_n(&arena_body(arena)->top, __ATOMIC_RELAXED);
}

/* Whether the top grew by much, or went back to an earlier heap, as the later ones were free whole. */
static inline bool has_merged(uintptr_t before, uintptr_t after) {
    return (intptr_t)(before - after) >= (intptr_t)GOVERNOR_MERGE_BYTES || (before ^ after) >= HEAP_MAX_BYTES;
}

/*
 * A block that the thread cache does not take may merge with all that was freed before it, however small it
 * is: a heap freed in random order comes free with its last blocks. A process that then falls idle would look
 * no more.
 */
__attribute__((noinline)) static void free_and_watch_top(void *block, size_t size_flags) {
    struct arena *arena = atomic_load_explicit(&governor_view.main_arena, memory_order_relaxed);
    if ((size_flags & CHUNK_NON_MAIN_ARENA) != 0) {
        if (UNLIKELY(!atomic_load_explicit(&governor_view.heaps_proved, memory_order_relaxed))) {
            __libc_free(block);
            return;
        }
        arena = heap_of(block)->arena;
    }
    uintptr_t before = top_of(arena);
    __libc_free(block);
    if (UNLIKELY(has_merged(before, top_of(arena)))) {
        grant_free(look_at(arena, LOOK_MERGED, freed_since_look(0)).free_bytes);
    }
}

/* One byte at least is paid: without a start, as beside a sanitizer, the allowance covers no call. */
EXPORT void *malloc(size_t bytes) {
    if (UNLIKELY(!pay(&allowance.alloc_bytes, bytes | 1))) {
        return malloc_and_look(bytes);
    }
    return __libc_malloc(bytes);
}

EXPORT void *calloc(size_t count, size_t bytes) {
    /* An overflowing product pays a wrong sum, once, and gets glibc's own refusal. */
    if (UNLIKELY(!pay(&allowance.alloc_bytes, (count * bytes) | 1))) {
        return calloc_and_look(count, bytes);
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
        free_and_look(block);
        return;
    }
    if (size_flags > THREAD_CACHE_MAX_BYTES) {
        free_and_watch_top(block, size_flags);
        return;
    }
    __libc_free(block);
}

/* The same for what is rarely called. */
static void *allocated(void *block, size_t bytes) {
    if (pay(&allowance.alloc_bytes, bytes)) {
        return block;
    }
    return placement_is_on() ? after_placed(block, bytes) : after_allocation(block);
}

/* A block in an arena may use the next chunk's prev_size; an mmapped one has no next. */
static size_t usable_bytes(const void *block) {
    return chunk_bytes(chunk_of_block(block)) -
           (is_mmapped(block) ? glibc_mmapped_overhead_bytes : sizeof(size_t));
}

/* A block begins for good where it was placed: its mapping is resized, or all of it is copied. */
__attribute__((noinline)) static void *realloc_mmapped(void *block, size_t bytes) {
    void *own = placement_glibcs(block);
    size_t shift = (size_t)((char *)block - (char *)own);
    size_t kept = smaller(usable_bytes(block), bytes);
    /* Nothing, which frees it, and too much are glibc's to answer. */
    void *moved = __libc_realloc(own, bytes == 0 || bytes > PTRDIFF_MAX ? bytes : bytes + shift);
    return allocated(placement_keep(moved, shift, kept), bytes);
}

EXPORT void *realloc(void *block, size_t bytes) {
    if (block == NULL) {
        return malloc(bytes);
    }
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_realloc(block, bytes);
    }
    if (is_mmapped(block)) {
        return realloc_mmapped(block, bytes);
    }
    size_t old_bytes = chunk_bytes(chunk_of_block(block));
    struct arena *old_arena = governor_arena_of(block);
    void *moved = __libc_realloc(block, bytes);
    if (UNLIKELY(!pay(&allowance.free_bytes, old_bytes)) && old_arena != NULL) {
        grant_free(look_at(old_arena, LOOK_FREED, freed_since_look(old_bytes)).free_bytes);
    }
    if (UNLIKELY(!pay(&allowance.alloc_bytes, bytes))) {
        if (UNLIKELY(placement_is_on())) {
            size_t kept = smaller(old_bytes - sizeof(size_t), bytes);
            return after_placed(placement_place(moved, bytes, kept), bytes);
        }
        return after_allocation(moved);
    }
    return moved;
}

EXPORT void *reallocarray(void *block, size_t count, size_t bytes) {
    size_t total;
    if (__builtin_mul_overflow(count, bytes, &total)) {
        errno = ENOMEM;
        return NULL;
    }
    return realloc(block, total);
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
    if (UNLIKELY(sanitizer_is_there())) {
        return memalign((size_t)sysconf(_SC_PAGESIZE), bytes);
    }
    return allocated(__libc_valloc(bytes), bytes);
}

EXPORT void *pvalloc(size_t bytes) {
    if (UNLIKELY(sanitizer_is_there())) {
        size_t page_bytes = (size_t)sysconf(_SC_PAGESIZE);
        return memalign(page_bytes, bytes == 0 ? page_bytes : (bytes + page_bytes - 1) & ~(page_bytes - 1));
    }
    return allocated(__libc_pvalloc(bytes), bytes);
}

EXPORT size_t malloc_usable_size(void *block) {
    if (UNLIKELY(sanitizer_is_there())) {
        return __interceptor_malloc_usable_size(block);
    }
    return block == NULL ? 0 : usable_bytes(block);
}

EXPORT int mallopt(int parameter, int value) {
    governor_note_mallopt(parameter, (size_t)value);
    int done = __libc_mallopt(parameter, value);
    if (parameter == M_MMAP_THRESHOLD && done == 1) {
        governor_note_mmap_threshold((size_t)value);
    }
    return done;
}
