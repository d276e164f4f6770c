/*
 * The reference model of an allocator: the blocks that are in use, and what each holds. No two overlap, each
 * keeps its content, and has the alignment and the size that were asked for.
 */
#ifndef CALM_TESTS_FUZZ_BLOCKS_H
#define CALM_TESTS_FUZZ_BLOCKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct block {
    unsigned char *start; /* NULL: none */
    size_t bytes;         /* that may be used */
    uint64_t mark;        /* what its content is computed from */
    uint32_t size_class;  /* of the heap's; for targets that need it */
};

/* Checks a new block against all that are in use, and fills it. count: of the array. */
void blocks_add(struct block *blocks, size_t count, struct block *block, void *start, size_t bytes,
                size_t alignment);

/* Checks the content of a block's first bytes. */
void blocks_check(const struct block *block, size_t bytes);

/* Fills a block anew. */
void blocks_fill(struct block *block);

/* Checks that memory is zero: all of it up to 16 KiB, else some bytes. */
void blocks_check_zero(const void *start, size_t bytes);

/* Bytes of all blocks. */
size_t blocks_sum(const struct block *blocks, size_t count);

#endif
