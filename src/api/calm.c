/* The functions of calmalloc.h. */
#include "calmalloc.h"

#include "api/allocator.h"
#include "api/counters.h"
#include "api/features.h"
#include "api/options.h"
#include "api/report.h"
#include "api/settings.h"
#include "os/syscall.h"

#include <errno.h>
#include <string.h>

void *calm_malloc(size_t size) {
    return allocate(size);
}

void calm_free(void *block) {
    release(block);
}

void *calm_calloc(size_t count, size_t size) {
    return allocate_zeroed(count, size);
}

void *calm_realloc(void *block, size_t size) {
    return reallocate(block, size);
}

void *calm_reallocarray(void *block, size_t count, size_t size) {
    size_t bytes;
    return __builtin_mul_overflow(count, size, &bytes) ? out_of_memory() : reallocate(block, bytes);
}

void *calm_aligned_alloc(size_t alignment, size_t size) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0) {
        errno = EINVAL;
        return NULL;
    }
    return allocate_aligned(alignment, size);
}

int calm_posix_memalign(void **block, size_t alignment, size_t size) {
    if (alignment == 0 || (alignment & (alignment - 1)) != 0 || alignment % sizeof(void *) != 0) {
        return EINVAL;
    }
    int saved_errno = errno;
    void *aligned = allocate_aligned(alignment, size);
    if (aligned == NULL) {
        errno = saved_errno;
        return ENOMEM;
    }
    *block = aligned;
    return 0;
}

void calm_free_sized(void *block, size_t size) {
    (void)size;
    release(block);
}

void calm_free_aligned_sized(void *block, size_t alignment, size_t size) {
    (void)alignment, (void)size;
    release(block);
}

size_t calm_malloc_usable_size(const void *block) {
    return usable_size(block);
}

/* Returns 0, or sets errno and returns -1. */
static int result_of(int error) {
    return (int)libc_result(-error);
}

size_t calm_trim(size_t keep_bytes) {
    return allocator_trim(keep_bytes);
}

int calm_stats(struct calm_stats *stats, size_t size) {
    if (stats == NULL || size < offsetof(struct calm_stats, footprint)) {
        return result_of(EINVAL);
    }
    struct calm_stats all;
    counters_fill(&all);
    all.size = (uint32_t)(size < sizeof all ? size : sizeof all);
    memcpy(stats, &all, all.size);
    return 0;
}

/* Copies like snprintf: as much as fits, ended by NUL. Returns the length of
 * the whole text. */
static int copy_out(const char *text, size_t length, char *buffer, size_t size) {
    if (size > 0) {
        size_t copied = length < size ? length : size - 1;
        memcpy(buffer, text, copied);
        buffer[copied] = '\0';
    }
    return (int)length;
}

int calm_stats_json(char *buffer, size_t size) {
    struct text text = {0};
    report_json(&text);
    return copy_out(text.bytes, text.length, buffer, size);
}

int calm_set(const char *name, const char *value) {
    bool valid = name != NULL && value != NULL && allocator_ensure_started();
    return result_of(valid ? settings_set(name, value) : EINVAL);
}

int calm_profile_write(const char *path) {
    return result_of(path == NULL ? EINVAL : heap_profile_write(path));
}

int calm_get(const char *name, char *buffer, size_t size) {
    for (enum option which = 0; name != NULL && allocator_ensure_started() && which < OPTION_COUNT; which++) {
        if (strcmp(options_name(which), name) == 0) {
            struct text text = {0};
            options_print(which, &text);
            return copy_out(text.bytes, text.length, buffer, size);
        }
    }
    return result_of(ENOENT);
}
