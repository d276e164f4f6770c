/* Preloaded into a program that is recorded: tells the plugin where an allocation call begins and what it
 * returned. The blocks are glibc's. What realloc copies and calloc clears is the program's own, so that the
 * replay has it. */
#include "record.h"

#include <errno.h>
#include <malloc.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

extern void *__libc_malloc(size_t size);
extern void *__libc_memalign(size_t alignment, size_t size);
extern void __libc_free(void *block);

static void mark(enum mark_kind kind, const void *block, size_t size) {
    int kept = errno;
    (void)syscall(MARK_CALL, (long)kind, block, size);
    errno = kept;
}

static void *marked(void *block, size_t size) {
    mark(block != NULL ? MARK_MALLOC : MARK_LEAVE, block, size);
    return block;
}

EXPORT void *malloc(size_t size) {
    mark(MARK_ENTER, NULL, 0);
    return marked(__libc_malloc(size), size);
}

EXPORT void *memalign(size_t alignment, size_t size) {
    mark(MARK_ENTER, NULL, 0);
    return marked(__libc_memalign(alignment, size), size);
}

EXPORT void free(void *block) {
    if (block == NULL) {
        return;
    }
    mark(MARK_ENTER, NULL, 0);
    __libc_free(block);
    mark(MARK_FREE, block, 0);
}

EXPORT void *calloc(size_t count, size_t size) {
    size_t bytes;
    if (__builtin_mul_overflow(count, size, &bytes)) {
        errno = ENOMEM;
        return NULL;
    }
    void *block = malloc(bytes);
    return block != NULL ? memset(block, 0, bytes) : NULL;
}

EXPORT void *realloc(void *block, size_t size) {
    if (block == NULL) {
        return malloc(size);
    }
    if (size == 0) {
        free(block);
        return NULL;
    }
    mark(MARK_ENTER, NULL, 0);
    size_t had = malloc_usable_size(block);
    mark(MARK_LEAVE, NULL, 0);
    if (size <= had && size >= had / 2) {
        return block;
    }
    void *moved = malloc(size);
    if (moved != NULL) {
        memcpy(moved, block, had < size ? had : size);
        free(block);
    }
    return moved;
}

EXPORT void *aligned_alloc(size_t alignment, size_t size) {
    return memalign(alignment, size);
}

EXPORT int posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment % sizeof(void *) != 0 || (alignment & (alignment - 1)) != 0 || alignment == 0) {
        return EINVAL;
    }
    int kept = errno;
    void *found = memalign(alignment, size);
    errno = kept;
    if (found == NULL) {
        return ENOMEM;
    }
    *block = found;
    return 0;
}
