/* A library that deep_bound opens with RTLD_DEEPBIND: it allocates when it is loaded, and exchanges blocks
 * with the program. */
#include "deep_bound.h"

#include <malloc.h>
#include <stdlib.h>
#include <string.h>

static void *first[KINDS];

void *plugin_allocate(enum kind kind, size_t bytes) {
    void *block = NULL;
    switch (kind) {
    case KIND_MALLOC:
        return malloc(bytes);
    case KIND_CALLOC:
        return calloc(bytes, 1);
    case KIND_REALLOC:
        return realloc(malloc(bytes / 3), bytes);
    case KIND_REALLOCARRAY:
        return reallocarray(NULL, bytes, 1);
    case KIND_ALIGNED_ALLOC:
        return aligned_alloc(64, bytes);
    case KIND_MEMALIGN:
        return memalign(256, bytes);
    case KIND_POSIX_MEMALIGN:
        return posix_memalign(&block, 4096, bytes) == 0 ? block : NULL;
    case KIND_VALLOC:
        return valloc(bytes);
    case KIND_PVALLOC:
        return pvalloc(bytes);
    case KIND_STRDUP: { /* of libc's own */
        char *text = malloc(bytes);
        memset(text, 'x', bytes - 1);
        text[bytes - 1] = '\0';
        block = strdup(text);
        free(text);
        return block;
    }
    default:
        return NULL;
    }
}

void plugin_free(void *block) {
    free(block);
}

void *plugin_realloc(void *block, size_t bytes) {
    return realloc(block, bytes);
}

size_t plugin_usable_size(void *block) {
    return malloc_usable_size(block);
}

/* The program has a function of this name, too. */
int whose(void) {
    return OF_PLUGIN;
}

int plugin_finds(void) {
    return whose();
}

__attribute__((constructor)) static void load(void) {
    for (enum kind kind = 0; kind < KINDS; kind++) {
        first[kind] = plugin_allocate(kind, 1000);
    }
}

void *plugin_first(enum kind kind) {
    return first[kind];
}
