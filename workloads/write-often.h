/* The work that the two false-sharing workloads do with a block. */
#ifndef CALMALLOC_WORKLOADS_WRITE_OFTEN_H
#define CALMALLOC_WORKLOADS_WRITE_OFTEN_H

#include <stdbool.h>
#include <stddef.h>

/* Counts up every byte so many times, each time in memory, and tells whether all the counts are right. While
 * another CPU writes to the same cache line, each of the writes may have to fetch the line back. */
static inline bool write_often(volatile unsigned char *block, size_t size, unsigned long times) {
    for (size_t i = 0; i < size; i++) {
        block[i] = 0;
    }
    for (unsigned long time = 0; time < times; time++) {
        for (size_t i = 0; i < size; i++) {
            block[i] = (unsigned char)(block[i] + 1);
        }
    }
    bool right = true;
    for (size_t i = 0; i < size; i++) {
        right = right && block[i] == (unsigned char)times;
    }
    return right;
}

#endif
