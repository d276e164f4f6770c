#ifndef CALM_TESTS_DEEP_BOUND_H
#define CALM_TESTS_DEEP_BOUND_H

#include <stddef.h>

enum kind {
    KIND_MALLOC,
    KIND_CALLOC,
    KIND_REALLOC,
    KIND_REALLOCARRAY,
    KIND_ALIGNED_ALLOC,
    KIND_MEMALIGN,
    KIND_POSIX_MEMALIGN,
    KIND_VALLOC,
    KIND_PVALLOC,
    KIND_STRDUP,
    KINDS
};

enum { OF_PROGRAM = 1, OF_PLUGIN = 2 };

void *plugin_allocate(enum kind kind, size_t bytes);
void plugin_free(void *block);
void *plugin_realloc(void *block, size_t bytes);
size_t plugin_usable_size(void *block);
int plugin_finds(void);
void *plugin_first(enum kind kind);
int whose(void);

#endif
