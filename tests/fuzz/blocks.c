#include "blocks.h"

#include "check.h"

/* Blocks up to this size are filled and checked byte by byte, others at both ends and in some pages: what is
 * touched takes most of the time. */
#define WHOLE_BYTES      1024
#define END_BYTES        64
#define PAGE_BYTES       4096
#define MAX_STEPS        32
#define WHOLE_ZERO_BYTES 16384

static uint64_t last_mark;

static unsigned char byte_at(const struct block *block, size_t at) {
    return (unsigned char)((block->mark + at) * 0x9e3779b97f4a7c15U >> 56);
}

/* Between two pages that are touched. */
static size_t step_of(size_t bytes) {
    return (bytes / MAX_STEPS / PAGE_BYTES + 1) * PAGE_BYTES;
}

/* The offset after `at` at which a block is filled. */
static size_t next_offset(const struct block *block, size_t at) {
    if (block->bytes <= WHOLE_BYTES || at + 1 < END_BYTES || at + END_BYTES >= block->bytes) {
        return at + 1;
    }
    size_t next = at + step_of(block->bytes) - at % PAGE_BYTES;
    size_t end = block->bytes - END_BYTES;
    return next < end ? next : end;
}

void blocks_fill(struct block *block) {
    block->mark = ++last_mark * 0x10001;
    for (size_t at = 0; at < block->bytes; at = next_offset(block, at)) {
        block->start[at] = byte_at(block, at);
    }
}

void blocks_check(const struct block *block, size_t bytes) {
    for (size_t at = 0; at < bytes; at = next_offset(block, at)) {
        CHECK_EQUAL(block->start[at], byte_at(block, at));
    }
}

void blocks_check_zero(const void *start, size_t bytes) {
    const unsigned char *memory = start;
    size_t step = bytes <= WHOLE_ZERO_BYTES ? 1 : step_of(bytes) / 2;
    for (size_t at = 0; at < bytes; at += step) {
        CHECK_EQUAL(memory[at], 0);
    }
    CHECK(bytes == 0 || memory[bytes - 1] == 0);
}

void blocks_add(struct block *blocks, size_t count, struct block *block, void *start, size_t bytes,
                size_t alignment) {
    CHECK(start != NULL);
    CHECK_EQUAL((uintptr_t)start % alignment, 0);
    const unsigned char *first = start;
    for (size_t i = 0; i < count; i++) {
        const struct block *other = &blocks[i];
        if (other != block && other->start != NULL) {
            CHECK(first + bytes <= other->start || other->start + other->bytes <= first);
        }
    }
    block->start = start;
    block->bytes = bytes;
    blocks_fill(block);
}

size_t blocks_sum(const struct block *blocks, size_t count) {
    size_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        sum += blocks[i].start == NULL ? 0 : blocks[i].bytes;
    }
    return sum;
}
