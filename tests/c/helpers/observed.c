/*
 * glibc's malloc, annotated for ThreadSanitizer.
 *
 * glibc locks an arena's mutex by instructions that sanitizers do not see. The annotations between the
 * library's calls and glibc's describe that locking exactly: an allocation and a free lock and unlock the
 * block's arena, and one arena may get from the kernel what another has returned. Without them, every block
 * that moves between threads within glibc would appear as a race. The library's own accesses are still
 * checked.
 */
#include "glibc_layout.h"
#include "glibc_malloc.h"

#ifdef __SANITIZE_THREAD__
#define TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TSAN 1
#endif
#endif

#ifdef TSAN
extern void __tsan_acquire(void *address);
extern void __tsan_release(void *address);

/* glibc's part reads headers too, before it is said here that it may. */
#define UNWATCHED __attribute__((noinline, no_sanitize("thread")))

/* The main arena's mutex is not known here: any address of our own stands for it. */
static char main_arena_stand_in;

UNWATCHED static void *mutex_of(void *block) {
    if ((chunk_of_block(block)->size_flags & CHUNK_NON_MAIN_ARENA) == 0) {
        return &main_arena_stand_in;
    }
    return (void *)&heap_of(block)->arena->mutex;
}

UNWATCHED static int is_of_arena(void *block) {
    return block != NULL && (chunk_of_block(block)->size_flags & CHUNK_IS_MMAPPED) == 0;
}

static void *after_allocation(void *block) {
    if (is_of_arena(block)) {
        __tsan_acquire(mutex_of(block));
        __tsan_acquire(heap_of(block));
    }
    return block;
}

struct freeing {
    void *mutex, *heap;
};

static struct freeing before_free(void *block) {
    struct freeing freeing = {NULL, NULL};
    if (is_of_arena(block)) {
        freeing.mutex = mutex_of(block);
        freeing.heap = heap_of(block);
        __tsan_release(freeing.mutex);
    }
    return freeing;
}

static void after_free(struct freeing freeing) {
    if (freeing.mutex != NULL) {
        __tsan_acquire(freeing.mutex);
        __tsan_release(freeing.heap);
    }
}
#else
struct freeing {
    char none;
};

static void *after_allocation(void *block) {
    return block;
}

static struct freeing before_free(void *block) {
    (void)block;
    return (struct freeing){0};
}

static void after_free(struct freeing freeing) {
    (void)freeing;
}
#endif

void *observed_malloc(size_t bytes);
void *observed_calloc(size_t count, size_t bytes);
void *observed_realloc(void *block, size_t bytes);
void observed_free(void *block);

void *observed_malloc(size_t bytes) {
    return after_allocation(__libc_malloc(bytes));
}

void *observed_calloc(size_t count, size_t bytes) {
    return after_allocation(__libc_calloc(count, bytes));
}

void *observed_realloc(void *block, size_t bytes) {
    struct freeing freeing = before_free(block);
    void *moved = __libc_realloc(block, bytes);
    after_free(freeing);
    return after_allocation(moved);
}

void observed_free(void *block) {
    struct freeing freeing = before_free(block);
    __libc_free(block);
    after_free(freeing);
}
