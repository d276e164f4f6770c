/* Stands before malloc, as a profiler does: counts what passes through it, and prints it at the end. */
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static _Atomic(unsigned long) allocated;
static _Atomic(unsigned long) freed;

#define NEXT(name)                                 \
    static __typeof__(name) *next;                 \
    if (next == NULL) {                            \
        *(void **)&next = dlsym(RTLD_NEXT, #name); \
    }

/* As C permits. */
void *malloc(size_t size) {
    NEXT(malloc)
    allocated += size > 0;
    return size == 0 ? NULL : next(size);
}

void *calloc(size_t count, size_t size) {
    NEXT(calloc)
    allocated++;
    return next(count, size);
}

void *realloc(void *block, size_t size) {
    NEXT(realloc)
    allocated++;
    freed += block != NULL;
    return next(block, size);
}

/* As some allocators are: of sizes that are no multiple of the alignment it has none. */
void *aligned_alloc(size_t alignment, size_t size) {
    NEXT(aligned_alloc)
    if (size % alignment != 0) {
        return NULL;
    }
    allocated++;
    return next(alignment, size);
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    NEXT(posix_memalign)
    allocated++;
    return next(block, alignment, size);
}

void free(void *block) {
    NEXT(free)
    freed += block != NULL;
    next(block);
}

static __attribute__((destructor)) void print(void) {
    (void)fprintf(stderr, "allocated %lu, freed %lu\n", allocated, freed);
}
