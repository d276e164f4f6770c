/*
 * How another process reads a library's counters while the program runs: without a copy, a request, or a
 * pause of the program.
 *
 * The library's image has an ELF note, of owner "calmalloc", whose content is the distance from itself to a
 * table in the library's constant data. The table says where the words of each counter are and how they add
 * up; a process that may read this one's memory (process_vm_readv) follows it. A note is found in every image
 * that is loaded, also if the file was deleted or stripped, and if the library is part of a static program.
 *
 * The words are those that the library counts in anyway, read without a lock: each value is of another
 * moment. So a reader is all that costs anything. After fork, the child's words are its own, and its totals
 * are counted from the fork on.
 */
#ifndef CALM_OS_COUNTER_TABLE_H
#define CALM_OS_COUNTER_TABLE_H

#include <stdint.h>

#define COUNTER_TABLE_MAGIC   "calmstat" /* without its NUL */
#define COUNTER_TABLE_VERSION 1

enum counter_unit {
    COUNTER_PLAIN, /* counts and bytes */
    COUNTER_PAGES, /* to be shown in bytes */
    COUNTER_WORDS, /* bytes, to be shown in words of 8 */
};

enum counter_flags {
    COUNTER_SUBTRACT = 1, /* this term is subtracted */
};

/*
 * A term. Terms of one name, which follow each other, add up to a counter. A term is the sum of the words at
 * `at` + offset + row * row_stride + i * stride, for all i below count and all rows below *rows. Rows that do
 * not count should not be read: the kernel would make page tables for memory that was never touched.
 */
struct counter_term {
    char name[24]; /* NUL-terminated */
    const void *at;
    const void *rows;    /* a uint32_t; NULL: one row */
    const void *present; /* a pointer to bytes, the first at present_offset, then present_stride apart: a row
                            whose byte is 0 does not count; NULL: all rows do */
    const void *weights; /* a uint32_t for each i, by which its word is multiplied; NULL: 1 each */
    uint32_t pointers;   /* 0: the words are at `at`. Otherwise `at` is the first of so many pointers, ... */
    uint32_t pointer_stride; /* ... so far apart, to words that add up; of those at NULL none is read */
    uint32_t offset;
    uint32_t row_stride;
    uint32_t stride;
    uint32_t weight_stride;
    uint32_t present_offset;
    uint32_t present_stride;
    uint32_t base_offset; /* from a word to one like it, whose complement is subtracted from it, down to 0;
                             0: none */
    uint16_t count;       /* 0 is 1 */
    uint8_t bytes;        /* of a word: 1, 2, 4 or 8, unsigned */
    uint8_t unit;         /* enum counter_unit */
    uint32_t flags;       /* enum counter_flags */
};

/* New fields are added at the end, which the sizes show; a change of meaning changes the version. */
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
    /* A uint32_t: the number, in its own PID namespace, of the process whose counts these are. Another one is
     * that of the parent, from which a child has just been forked. 0, or NULL: not known. */
    const void *process;
};

/* The initializer of a table for an array of terms; designated initializers may follow. */
#define COUNTER_TABLE(name, array, ...)                                                                     \
    {                                                                                                       \
        .magic = {'c', 'a', 'l', 'm', 's', 't', 'a', 't'}, .version = COUNTER_TABLE_VERSION,                \
        .bytes = sizeof(struct counter_table), .term_bytes = sizeof(struct counter_term), .terms = (array), \
        .count = sizeof(array) / sizeof(struct counter_term), .library = (name), __VA_ARGS__                \
    }

/* The note that leads to a table, which must be a hidden symbol with attribute `used`. Linkers always keep
 * notes, and what they refer to. */
#define COUNTER_TABLE_NOTE(table)                        \
    __asm__(".pushsection .note.calmalloc,\"a\",%note\n" \
            ".balign 4\n"                                \
            ".long 10, 8, 1\n"                           \
            ".asciz \"calmalloc\"\n"                     \
            ".balign 4\n"                                \
            ".quad " #table " - .\n"                     \
            ".popsection\n")

#endif
