#define _GNU_SOURCE /* MADV_HUGEPAGE */
#include "arrays.h"
#include "support.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct array array_malloc(const char *program, size_t bytes) {
    void *block = checked(malloc(bytes), program);
    return (struct array){block, block, 0};
}

struct array array_aligned(const char *program, size_t bytes) {
    void *block = NULL;
    if (posix_memalign(&block, ALIAS_BYTES, bytes) != 0) {
        fail(program, "out of memory");
    }
    return (struct array){block, block, 0};
}

struct array array_padded(const char *program, size_t bytes, unsigned long number, unsigned long count) {
    char *block = checked(malloc(bytes + 2 * (size_t)ALIAS_BYTES), program);
    size_t wanted = ALIAS_BYTES * number / count / LINE_BYTES * LINE_BYTES;
    size_t to_boundary = (ALIAS_BYTES - (uintptr_t)block % ALIAS_BYTES) % ALIAS_BYTES;
    return (struct array){block + to_boundary + wanted, block, 0};
}

struct array array_mapped(const char *program, size_t bytes, enum huge huge) {
    size_t whole = (bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    size_t mapped = whole + HUGE_PAGE_BYTES;
    char *block = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) {
        fail(program, "out of memory");
    }
    char *start = block + (HUGE_PAGE_BYTES - (uintptr_t)block % HUGE_PAGE_BYTES) % HUGE_PAGE_BYTES;
    if (huge != HUGE_SYSTEM) {
        /* A kernel without huge pages refuses both: then all pages are small, as huge_kib tells. */
        (void)madvise(start, whole, huge == HUGE_ON ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }
    return (struct array){start, block, mapped};
}

void array_free(const struct array *array) {
    if (array->mapped != 0) {
        (void)munmap(array->block, array->mapped);
    } else {
        free(array->block);
    }
}

unsigned long distinct_starts(void *const *starts, unsigned long count) {
    bool used[ALIAS_BYTES / LINE_BYTES] = {false};
    unsigned long distinct = 0;
    for (unsigned long k = 0; k < count; k++) {
        size_t line = (uintptr_t)starts[k] % ALIAS_BYTES / LINE_BYTES;
        distinct += !used[line];
        used[line] = true;
    }
    return distinct;
}

unsigned long huge_kib(const char *program) {
    FILE *file = fopen("/proc/self/smaps_rollup", "re");
    if (file == NULL) {
        fail(program, "cannot read /proc/self/smaps_rollup");
    }
    static const char label[] = "AnonHugePages:";
    unsigned long kib = 0;
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        if (strncmp(line, label, sizeof label - 1) == 0) {
            kib = strtoul(line + sizeof label - 1, NULL, 10);
        }
    }
    (void)fclose(file);
    return kib;
}
