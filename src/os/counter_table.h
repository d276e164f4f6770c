/*
 * The table by which another process reads a library's counters while the
 * program runs. The reader needs no copy, no request and no pause of the
 * program.
 *
 * The library's image has an ELF note whose owner is "calmalloc". The note's
 * content is the distance from itself to a table in the library's constant
 * data. The table says where the words of each counter are and how they add up.
 * A process that may read this process's memory (process_vm_readv) finds the
 * table by this distance. Every loaded image has its notes, even if its file
 * was deleted or stripped, and even if the library is part of a static program.
 *
 * The library counts in these words anyway, so only a reader costs time. A
 * reader takes no lock, so it reads each value at another moment. After fork,
 * the child has its own words, and its totals start at the fork.
 */
#ifndef CALM_OS_COUNTER_TABLE_H
#define CALM_OS_COUNTER_TABLE_H

#include <stdint.h>

#define COUNTER_TABLE_MAGIC   "calmstat" /* without its NUL */
#define COUNTER_TABLE_VERSION 1

enum counter_unit {
    COUNTER_PLAIN, /* counts and bytes */
    COUNTER_PAGES, /* to be shown in bytes */
    COUNTER_WORDS, /* bytes, to be shown in words of 8 bytes */
};

enum counter_flags {
    COUNTER_SUBTRACT = 1, /* subtract this term */
};

/*
 * A term. Consecutive terms with the same name add up to a counter. A term is
 * the sum of the words at `at` + offset + row * row_stride + i * stride, for
 * all i below count and all rows below *rows. A reader should not read rows
 * that do not count, since the kernel would make page tables for memory that
 * was never touched.
 */
struct counter_term {
    char name[24]; /* NUL-terminated */
    const void *at;
    const void *rows;        /* a uint32_t; NULL: one row */
    const void *present;     /* a pointer to bytes, the first at present_offset, the next ones present_stride
                                apart; a row whose byte is 0 does not count; NULL: all rows count */
    const void *weights;     /* a uint32_t for each i, by which its word is multiplied; NULL: 1 each */
    uint32_t pointers;       /* number of pointers to words, from `at` on; 0: the words are at `at` */
    uint32_t pointer_stride; /* distance between two pointers; their words add up; NULL has no words */
    uint32_t offset;
    uint32_t row_stride;
    uint32_t stride;
    uint32_t weight_stride;
    uint32_t present_offset;
    uint32_t present_stride;
    uint32_t base_offset; /* distance to a word of this size, whose complement is subtracted from the word,
                             down to 0; 0: nothing is subtracted */
    uint16_t count;       /* 0 means 1 */
    uint8_t bytes;        /* of a word: 1, 2, 4 or 8; a word is unsigned */
    uint8_t unit;         /* enum counter_unit */
    uint32_t flags;       /* enum counter_flags */
};

/* New fields are added at the end, and the sizes show that. A change of meaning
 * changes the version. */
struct counter_table {
    char magic[8];
    uint32_t version;
    uint16_t bytes; /* of this structure */
    uint16_t term_bytes;
    const struct counter_term *terms;
    uint64_t count;      /* of terms */
    char library[24];    /* NUL-terminated */
    char release[16];    /* of the library, as in CALM_RELEASE; NUL-terminated */
    const void *control; /* a struct control, for requests to the library; NULL: it takes none */
    const void *samples; /* the layout of the heap profile; NULL: the library has none */
    const void *blocks; /* the layout of the heap, for reading which blocks are in use; NULL: not described */
    /* A uint32_t: the number of the process that has counted, in its own PID
     * namespace. In a child that has just been forked, it is still the parent's
     * number. 0, or NULL: not known. */
    const void *process;
};

/* The initializer of a table for an array of terms. Designated initializers may
 * follow. */
#define COUNTER_TABLE(name, array, ...)                                                                     \
    {                                                                                                       \
        .magic = {'c', 'a', 'l', 'm', 's', 't', 'a', 't'}, .version = COUNTER_TABLE_VERSION,                \
        .bytes = sizeof(struct counter_table), .term_bytes = sizeof(struct counter_term), .terms = (array), \
        .count = sizeof(array) / sizeof(struct counter_term), .library = (name), __VA_ARGS__                \
    }

/* The note that leads to a table. The table must be a hidden symbol with the
 * attribute `used`. Linkers always keep notes, and the symbols that notes refer
 * to. */
#define COUNTER_TABLE_NOTE(table)                        \
    __asm__(".pushsection .note.calmalloc,\"a\",%note\n" \
            ".balign 4\n"                                \
            ".long 10, 8, 1\n"                           \
            ".asciz \"calmalloc\"\n"                     \
            ".balign 4\n"                                \
            ".quad " #table " - .\n"                     \
            ".popsection\n")

#endif
