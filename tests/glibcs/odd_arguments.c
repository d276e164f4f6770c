/* Prints what malloc(3) and its kin make of arguments that programs should not pass: each library's answers
 * are to be those of the C library that it runs on. */
#include <errno.h>
#include <malloc.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static size_t power_above(size_t alignment) {
    size_t power = 16;
    while (power < alignment && power <= SIZE_MAX / 4) {
        power *= 2;
    }
    return power;
}

/* errno only of what failed; -1 for a block that is not as aligned as it should be. */
static void print(const char *call, size_t first, size_t bytes, size_t alignment, void *block, int error) {
    int aligned = block == NULL || (uintptr_t)block % power_above(alignment) == 0;
    printf("%s(%zu, %zu): %s %d\n", call, first, bytes, block != NULL ? "block" : "NULL",
           aligned ? error : -1);
    free(block);
}

#define PRINT(name, first, bytes, alignment, call)                              \
    do {                                                                        \
        errno = 0;                                                              \
        void *block = call;                                                     \
        print(name, first, bytes, alignment, block, block == NULL ? errno : 0); \
    } while (0)

int main(void) {
    static const size_t alignments[] = {0,
                                        1,
                                        2,
                                        3,
                                        4,
                                        7,
                                        8,
                                        12,
                                        16,
                                        24,
                                        40,
                                        48,
                                        64,
                                        100,
                                        1000,
                                        4095,
                                        4096,
                                        4097,
                                        65537,
                                        (size_t)1 << 62,
                                        (size_t)1 << 63,
                                        ((size_t)1 << 63) + 1,
                                        SIZE_MAX - 15,
                                        SIZE_MAX};
    static const size_t sizes[] = {0,       1, 48, 100, 5000, 300000, PTRDIFF_MAX, (size_t)PTRDIFF_MAX + 1,
                                   SIZE_MAX};
    for (size_t j = 0; j < sizeof sizes / sizeof sizes[0]; j++) {
        volatile size_t bytes = sizes[j];
        for (size_t i = 0; i < sizeof alignments / sizeof alignments[0]; i++) {
            volatile size_t alignment = alignments[i];
            if (alignment > SIZE_MAX / 4 && bytes > PTRDIFF_MAX / 2) {
                continue; /* glibc 2.31 crashes */
            }
            PRINT("aligned_alloc", alignment, bytes, alignment, aligned_alloc(alignment, bytes));
            PRINT("memalign", alignment, bytes, alignment, memalign(alignment, bytes));
            void *block = NULL;
            int error = posix_memalign(&block, alignment, bytes);
            print("posix_memalign", alignment, bytes, alignment, block, error);
            size_t product;
            if (__builtin_mul_overflow(alignment, bytes, &product) || product < 1000000) {
                PRINT("reallocarray", alignment, bytes, 16, reallocarray(NULL, alignment, bytes));
                PRINT("calloc", alignment, bytes, 16, calloc(alignment, bytes));
            }
        }
        PRINT("valloc", (size_t)0, bytes, 4096, valloc(bytes));
        PRINT("pvalloc", (size_t)0, bytes, 4096, pvalloc(bytes));
        PRINT("malloc", (size_t)0, bytes, 16, malloc(bytes));
        PRINT("realloc", (size_t)10, bytes, 16, realloc(malloc(10), bytes));
    }
    printf("usable %zu\n", malloc_usable_size(NULL));
    return 0;
}
