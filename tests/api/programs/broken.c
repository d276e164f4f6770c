/* A malloc under calmalloc's names with occasional faults, selected by FAULT, which the stress test must
 * detect. */
#include "api.h"

#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <string.h>

static _Atomic(unsigned) calls;

/* Once the test is well under way, and then every so often. */
static bool now(int fault) {
    return FAULT == fault && atomic_fetch_add(&calls, 1) % 1000 == 999;
}

void *calm_malloc(size_t size) {
    static _Atomic(void *) twin;
    /* Handed out twice. */
    void *block = FAULT == 1 && size >= 16 && size <= 64 ? atomic_exchange(&twin, NULL) : NULL;
    if (block == NULL) {
        block = malloc(size);
        if (size >= 64 && now(1)) {
            atomic_store(&twin, block);
        }
    }
    return block;
}

void calm_free(void *block) {
    if (now(3)) {
        errno = EINVAL;
    }
    if (FAULT != 1) { /* not twice */
        free(block);
    }
}

void *calm_calloc(size_t count, size_t size) {
    unsigned char *block = calloc(count, size);
    if (now(4) && block != NULL && count * size > 100) {
        block[count * size - 1] = 1;
    }
    return block;
}

void *calm_realloc(void *block, size_t size) {
    if (FAULT == 1) {
        void *moved = malloc(size);
        if (block != NULL && moved != NULL) {
            size_t held = malloc_usable_size(block);
            memcpy(moved, block, held < size ? held : size);
        }
        return moved;
    }
    unsigned char *moved = realloc(block, size);
    if (now(5) && block != NULL && size > 16) {
        memset(moved, 0, 16);
    }
    return moved;
}

void *calm_reallocarray(void *block, size_t count, size_t size) {
    return calm_realloc(block, count * size);
}

void *calm_aligned_alloc(size_t alignment, size_t size) {
    if (now(2)) {
        return NULL;
    }
    return memalign(now(6) ? 16 : alignment, size);
}

int calm_posix_memalign(void **block, size_t alignment, size_t size) {
    *block = memalign(alignment, size);
    return *block == NULL ? ENOMEM : 0;
}

void calm_free_sized(void *block, size_t size) {
    (void)size;
    calm_free(block);
}

void calm_free_aligned_sized(void *block, size_t alignment, size_t size) {
    (void)alignment;
    calm_free_sized(block, size);
}

size_t calm_malloc_usable_size(const void *block) {
    return malloc_usable_size((void *)block);
}

size_t calm_trim(size_t keep_bytes) {
    (void)keep_bytes;
    return 0;
}

/* An account that is in order, but for fault 7. */
int calm_stats_json(char *buffer, size_t size) {
    return snprintf(buffer, size, "{}");
}

int calm_stats(struct calm_stats *stats, size_t size) {
    memset(stats, 0, size);
    stats->version = CALM_STATS_VERSION;
    stats->size = (uint32_t)size;
    stats->in_use = stats->footprint = stats->reserved = 1ULL << 40;
    stats->dirty_limit = stats->cached_limit = MIB;
    if (FAULT == 7 && atomic_fetch_add(&calls, 1) > 20) {
        stats->dirty = 2 * MIB;
        stats->in_use -= 2 * MIB;
    }
    return 0;
}

/* There is no helper. */
int calm_get(const char *name, char *buffer, size_t size) {
    (void)name;
    return snprintf(buffer, size, "off");
}
