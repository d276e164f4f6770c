/*
 * How a process outside reads a library's counters while the program runs: nothing is copied, asked or
 * stopped.
 *
 * The library's image has an ELF note, of owner "calmalloc", whose content is the distance from itself to a
 * table in the library's constant data. The table says where each figure's words lie and how they add up;
 * whoever may read the process's memory (process_vm_readv) follows it. A note is found in every image that is
 * loaded, also where the file is gone or stripped and where the library is part of a static program.
 *
 * The words are those that the library counts in anyway, read without a lock: each is a moment's value, and
 * two of them not of the same moment. So nothing is paid for until somebody reads. After fork the child's
 * words are its own.
 */
#ifndef CALM_OS_FIGURES_H
#define CALM_OS_FIGURES_H

#include <stdint.h>

#define FIGURES_MAGIC   "calmfigs" /* without its NUL */
#define FIGURES_VERSION 1

enum figure_unit {
    FIGURE_PLAIN, /* counts and bytes */
    FIGURE_PAGES, /* to be shown in bytes */
};

enum figure_flags {
    FIGURE_SUBTRACT = 1, /* this term counts against the figure */
    FIGURE_THROUGH = 2,  /* what lies there is a pointer, to which offset is added; NULL: the term is 0 */
};

/*
 * A term. Terms of the same name, which follow each other, add up to a figure. A term is the sum of the words
 * at `at` + offset + row * row_stride + i * stride, for i below count, and for rows below *rows. Rows that do
 * not count need not be read, and had better not be: a read gives the process page tables for what it never
 * touched.
 */
struct figure {
    char name[24]; /* NUL-terminated */
    const void *at;
    const void *rows;    /* a uint32_t; NULL: one row */
    const void *present; /* a pointer to bytes, the first at present_offset, present_stride apart: 0 says that
                            the row does not count; NULL: all rows do */
    const void *less;    /* uint16_t for each i, taken off its word, which is not less then 0; NULL: none */
    const void *weights; /* uint32_t for each i, by which its word is multiplied; NULL: 1 each */
    uint32_t offset;
    uint32_t row_stride;
    uint32_t stride;
    uint32_t weight_stride;
    uint32_t present_offset;
    uint32_t present_stride;
    uint16_t count; /* 0 is 1 */
    uint8_t bytes;  /* of a word: 1, 2, 4 or 8, unsigned */
    uint8_t unit;
    uint32_t flags;
};

/* The table's head; `count` terms of `figure_bytes` each follow. New fields go to the ends, and with them the
 * sizes; a change of meaning changes the version. */
struct figures {
    char magic[8];
    uint32_t version;
    uint32_t bytes; /* the head and all terms */
    uint16_t head_bytes;
    uint16_t figure_bytes;
    uint32_t count;
    char library[24];    /* NUL-terminated */
    char release[16];    /* of the library, as in CALM_RELEASE; NUL-terminated */
    const void *control; /* what a process outside may ask of the library; NULL: nothing */
    const void *samples; /* how the heap profile is laid out; NULL: the library takes none */
    const void
        *blocks; /* how the heap's spans are laid out, for reading what blocks are in use; NULL: not said */
};

/* More fields of the head may follow the table, as designated initializers. */
#define FIGURES_HEAD(name, table, ...)                                                                       \
    {                                                                                                        \
        .magic = {'c', 'a', 'l', 'm', 'f', 'i', 'g', 's'}, .version = FIGURES_VERSION,                       \
        .bytes = sizeof(table), .head_bytes = sizeof(struct figures), .figure_bytes = sizeof(struct figure), \
        .count = (sizeof(table) - sizeof(struct figures)) / sizeof(struct figure), .library = (name),        \
        __VA_ARGS__                                                                                          \
    }

/* The note that leads to a table, which must be a hidden symbol with attribute `used`. Linkers keep notes
 * whatever else they drop, and what notes refer to. */
#define FIGURES_NOTE(table)                              \
    __asm__(".pushsection .note.calmalloc,\"a\",%note\n" \
            ".balign 4\n"                                \
            ".long 10, 8, 1\n"                           \
            ".asciz \"calmalloc\"\n"                     \
            ".balign 4\n"                                \
            ".quad " #table " - .\n"                     \
            ".popsection\n")

#endif
