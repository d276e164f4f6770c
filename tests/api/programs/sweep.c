/* All sizes and alignments: sweep CASE [STEP]. A larger step tests fewer sizes, for slow machines. */
#include "api.h"
#include "names.h"

#include <errno.h>
#include <string.h>

struct piece {
    unsigned char *block;
    size_t asked, usable;
    uint64_t mark;
};

static size_t step_of(const char *argument) {
    size_t step = strtoul(argument, NULL, 10);
    return step == 0 ? 1 : step;
}

static size_t page_bytes(void) {
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t rounded_up(size_t value, size_t unit) {
    return (value + unit - 1) / unit * unit;
}

/* What a block may waste, where it is calmalloc's. */
static void check_waste(size_t asked, size_t usable) {
    if (!governed()) {
        return;
    }
    size_t most = asked <= 128        ? asked + 16
                  : asked <= 32 * KIB ? asked + asked / 8 + 16
                                      : rounded_up(asked, page_bytes());
    if (asked >= 16 * page_bytes() && rounded_up(asked, page_bytes()) - asked < 64) {
        most += page_bytes(); /* so that it may begin later */
    }
    if (asked == 0) {
        most = 32;
    }
    if (usable > most) {
        fprintf(stderr, "%zu bytes are usable of a block of %zu, more than %zu\n", usable, asked, most);
        _Exit(1);
    }
}

/* Large blocks of calmalloc's begin at all lines of a page, in direct and in offload mode. */
static void check_spread(const struct piece *pieces, size_t count) {
    size_t large = 0;
    uint64_t lines = 0;
    for (size_t i = 0; i < count; i++) {
        bool is_large = pieces[i].asked > 8 * page_bytes();
        large += is_large;
        lines |= is_large ? (uint64_t)1 << (uintptr_t)pieces[i].block % 4096 / 64 : 0;
    }
    CHECK(!governed() || large < 300 || __builtin_popcountll(lines) >= 48);
}

/* Where large blocks of calmalloc's may begin. */
static void check_place(const void *block, size_t asked) {
    CHECK(!governed() || asked <= 8 * page_bytes() || (uintptr_t)block % 64 == 0);
}

static struct piece new_piece(size_t bytes, uint64_t mark) {
    struct piece piece = {.block = malloc(bytes), .asked = bytes, .mark = mark};
    CHECK(piece.block != NULL);
    CHECK_EQUAL((uintptr_t)piece.block % 16, 0);
    check_place(piece.block, bytes);
    piece.usable = malloc_usable_size(piece.block);
    CHECK(piece.usable >= bytes);
    check_waste(bytes, piece.usable);
    return piece;
}

static int by_address(const void *first, const void *second) {
    const struct piece *a = first, *b = second;
    return a->block < b->block ? -1 : a->block > b->block;
}

/* Not with qsort, which allocates. */
static void sort_pieces(struct piece *pieces, size_t count) {
    for (size_t gap = count / 2; gap > 0; gap /= 2) {
        for (size_t i = gap; i < count; i++) {
            struct piece piece = pieces[i];
            size_t at = i;
            for (; at >= gap && by_address(&piece, &pieces[at - gap]) < 0; at -= gap) {
                pieces[at] = pieces[at - gap];
            }
            pieces[at] = piece;
        }
    }
}

static void check_apart(struct piece *pieces, size_t count) {
    sort_pieces(pieces, count);
    for (size_t i = 1; i < count; i++) {
        CHECK(pieces[i - 1].block + pieces[i - 1].usable <= pieces[i].block);
    }
}

static void check_and_free(struct piece *pieces, size_t count) {
    uint64_t random = 7;
    for (size_t left = count; left > 0; left--) {
        size_t at = next_random(&random) % left;
        CHECK(is_filled(pieces[at].block, pieces[at].usable, pieces[at].mark));
        free(pieces[at].block);
        pieces[at] = pieces[left - 1];
    }
}

/* Small programs have few classes, which waste more. */
static void be_no_small_program(void) {
    static void *blocks[300];
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        blocks[i] = malloc(64);
        CHECK(blocks[i] != NULL);
    }
    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        free(blocks[i]);
    }
}

/* Two blocks of each size live together, every usable byte of them filled. */
static void sweep_sizes(const char *argument) {
    size_t step = step_of(argument), capacity = 20000, count = 0;
    struct piece *pieces = own_pages(capacity * sizeof *pieces);
    be_no_small_program();
    for (size_t bytes = 0; bytes <= 70000; bytes += bytes < 2048 ? step : 37 * step) {
        for (int twice = 0; twice < 2; twice++) {
            CHECK(count < capacity);
            pieces[count] = new_piece(bytes, count);
            fill(pieces[count].block, pieces[count].usable, count);
            count++;
        }
    }
    for (size_t power = 64; power <= 4 * MIB; power *= 2) {
        for (size_t beside = 0; beside < 3; beside++) {
            CHECK(count < capacity);
            pieces[count] = new_piece(power + beside - 1, count);
            fill(pieces[count].block, pieces[count].usable, count);
            count++;
        }
    }
    check_apart(pieces, count);
    check_spread(pieces, count);
    check_and_free(pieces, count);
    say("pieces", count);
}

/* Large blocks that the program never touches cost no memory. */
static void sweep_doublings(const char *argument) {
    size_t largest = 4 * GIB;
    if (*argument != '\0') {
        largest = strtoul(argument, NULL, 10) * MIB;
    }
    size_t before = resident_bytes(), count = 0;
    static struct piece pieces[200];
    for (size_t power = 64 * KIB; power <= largest; power *= 2) {
        for (size_t beside = 0; beside < 3; beside++) {
            size_t bytes = power + beside - 1;
            pieces[count] = new_piece(bytes, count);
            pieces[count].block[0] = (unsigned char)count;
            pieces[count].block[pieces[count].usable - 1] = (unsigned char)~count;
            count++;
        }
    }
    say("grown", grown_since(before));
    check_apart(pieces, count);
    for (size_t i = 0; i < count; i++) {
        CHECK(pieces[i].block[0] == (unsigned char)pieces[i].mark);
        CHECK(pieces[i].block[pieces[i].usable - 1] == (unsigned char)~pieces[i].mark);
        free(pieces[i].block);
    }
}

static void sweep_alignments(const char *argument) {
    size_t step = step_of(argument);
    static struct piece pieces[4000];
    for (size_t alignment = 8; alignment <= 64 * MIB; alignment *= 2) {
        size_t count = 0;
        uint64_t mark = alignment;
        /* Few of them where each lies megabytes from the next. */
        size_t factor = 1 + step * (alignment > 64 * KIB ? 40 : 1);
        for (size_t bytes = 0; bytes <= 2 * MIB; bytes = bytes * factor + 1 + bytes % 7) {
            for (int way = 0; way < 3; way++) {
                void *block = NULL;
                if (way == 0) {
                    CHECK_EQUAL(posix_memalign(&block, alignment, bytes), 0);
                } else {
                    block = aligned_alloc(alignment, bytes);
                }
                CHECK(block != NULL && (uintptr_t)block % alignment == 0 && (uintptr_t)block % 16 == 0);
                CHECK(count < 4000);
                pieces[count] = (struct piece){block, bytes, malloc_usable_size(block), ++mark};
                CHECK(pieces[count].usable >= bytes);
                fill(block, pieces[count].usable, mark);
                count++;
            }
        }
        check_apart(pieces, count);
        for (size_t i = 0; i < count; i++) {
            struct piece *piece = &pieces[i];
            CHECK(is_filled(piece->block, piece->usable, piece->mark));
            if (i % 3 == 0) {
                /* An aligned block grows as any other. */
                unsigned char *moved = realloc(piece->block, piece->asked + 5000);
                CHECK(moved != NULL && is_filled(moved, piece->asked / 8 * 8, piece->mark));
                free(moved);
            } else if (i % 3 == 1 && HAS_SIZED_FREES && (uintptr_t)piece->block % alignment == 0) {
                free_aligned_sized(piece->block, alignment, piece->asked);
            } else {
                free(piece->block);
            }
        }
    }
}

static const size_t calloc_sizes[] = {1,     8,      15,     16,     17,      24,     48,    100,
                                      128,   200,    500,    1000,   1024,    1500,   2048,  3000,
                                      4096,  5000,   8192,   10000,  16384,   20000,  32768, 40000,
                                      65536, 100000, 131072, 300000, 1048576, 5000000};
#define CALLOC_SIZES (sizeof calloc_sizes / sizeof calloc_sizes[0])

/* What others left in the memory must not be seen, be it cached, dirty, or given back. */
static void calloc_dirty(size_t thread) {
    void *rows[64];
    for (size_t round = 0; round < 4; round++) {
        for (size_t i = 0; i < CALLOC_SIZES; i++) {
            size_t bytes = calloc_sizes[i] + round, count = bytes > 300000 ? 3 : (bytes > 20000 ? 16 : 64);
            for (size_t j = 0; j < count; j++) {
                rows[j] = malloc(bytes);
                CHECK(rows[j] != NULL);
                memset(rows[j], 0xA5, malloc_usable_size(rows[j]));
            }
            for (size_t j = 0; j < count; j++) {
                free(rows[round % 2 == 0 ? j : count - 1 - j]);
            }
            if (governed() && round == 2 && thread == 0) {
                calm_trim(i % 2 * MIB);
            }
            for (size_t j = 0; j < count; j++) {
                rows[j] = calloc(1 + j % 3, (bytes + j % 3) / (1 + j % 3));
                CHECK(rows[j] != NULL && is_zero(rows[j], (bytes + j % 3) / (1 + j % 3) * (1 + j % 3)));
                memset(rows[j], 0x5A, malloc_usable_size(rows[j]));
            }
            for (size_t j = 0; j < count; j++) {
                free(rows[j]);
            }
        }
    }
}

static void sweep_calloc(const char *argument) {
    calloc_dirty(0);
    if (*argument == '\0') {
        run_threads(4, calloc_dirty);
    }
}

/* From every size to every other, and by single bytes up and down. */
static size_t pair_step = 1;

static void realloc_pairs(size_t thread) {
    static const size_t sizes[] = {
        1,     7,     16,    17,     32,     48,     63,     64,     100,     128,     129,     200,    256,
        500,   1000,  1024,  2000,   4000,   4096,   4097,   8192,   10000,   16384,   30000,   32768,  32769,
        50000, 65536, 65537, 100000, 131072, 200000, 262144, 500000, 1048576, 1048577, 3000000, 8388608};
    size_t count = sizeof sizes / sizeof sizes[0];
    uint64_t mark = thread * 1000003;
    for (size_t i = 0; i < count; i++) {
        for (size_t j = 0; j < count; j++) {
            size_t from = sizes[i], to = sizes[j], kept = from < to ? from : to;
            if ((from + to > 4 * MIB && (i + j) % 5 != 0) || (i * 3 + j) % pair_step != 0) {
                continue;
            }
            unsigned char *block = malloc(from);
            CHECK(block != NULL);
            fill(block, from, ++mark);
            block = realloc(block, to);
            CHECK(block != NULL && (uintptr_t)block % 16 == 0 && malloc_usable_size(block) >= to);
            check_place(block, to);
            /* What a block shrinks by is not kept in it. */
            CHECK(!governed() || to > from / 2 || malloc_usable_size(block) <= 2 * to + 16);
            CHECK(is_filled(block, kept / 8 * 8, mark));
            /* All of it is the caller's. */
            fill(block, to, ++mark);
            CHECK(is_filled(block, to, mark));
            free(block);
        }
    }
}

static unsigned char byte_at(size_t i) {
    return (unsigned char)(i * 7 + (i >> 8));
}

static void sweep_realloc(const char *argument) {
    size_t step = step_of(argument), held = 0;
    pair_step = step > 4 ? 4 : 1;
    be_no_small_program();
    realloc_pairs(0);
    unsigned char *block = NULL;
    for (size_t bytes = step; bytes <= 40000; bytes += step) {
        block = realloc(block, bytes);
        CHECK(block != NULL);
        for (; held < bytes; held++) {
            block[held] = byte_at(held);
        }
        for (size_t i = 0; bytes / step % 64 == 0 && i < held; i++) {
            CHECK(block[i] == byte_at(i));
        }
    }
    for (; held > step; held -= step) {
        block = realloc(block, held);
        CHECK(block != NULL);
        for (size_t i = held / step % 64 == 0 ? 0 : held - step; i < held; i++) {
            CHECK(block[i] == byte_at(i));
        }
    }
    free(block);
    if (*argument == '\0') {
        run_threads(4, realloc_pairs);
    }
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"sizes", sweep_sizes},
                                             {"doublings", sweep_doublings},
                                             {"alignments", sweep_alignments},
                                             {"calloc", sweep_calloc},
                                             {"realloc", sweep_realloc}};
    return run_case(argc, argv, cases, sizeof cases / sizeof cases[0]);
}
