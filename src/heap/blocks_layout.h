/*
 * Where another process (calm explain) finds which blocks are in use, without a lock and without stopping the
 * program. The table of counters (os/counter_table.h) leads to it.
 *
 * It has the addresses of the heap's own records and the offsets within them, so that a reader needs no
 * header of this release. A reader sees each record at a different moment, and must expect that they
 * contradict each other.
 */
#ifndef CALM_HEAP_BLOCKS_LAYOUT_H
#define CALM_HEAP_BLOCKS_LAYOUT_H

#include <stdint.h>

#define BLOCKS_LAYOUT_VERSION 1
#define BLOCKS_LAYOUT_RANGES  8

/* New fields go to the end, and with them the size; a change of meaning changes the version. */
struct blocks_layout {
    char magic[8]; /* "calmblks", without its NUL */
    uint32_t version;
    uint32_t bytes;         /* of this struct */
    const void *page_bytes; /* a size_t */

    /* Descriptors of spans, by number. */
    const void *spans;         /* a pointer to the first; NULL before the first allocation */
    const void *spans_end;     /* a size_t: numbers below have been in use */
    const void *span_bytes;    /* a size_t: from one to the next */
    uint16_t span_page;        /* uint32_t: the number of its first page */
    uint16_t span_pages;       /* uint32_t */
    uint16_t span_used_blocks; /* uint16_t: of a slab, those in CPU caches and depots included */
    uint16_t span_class;       /* uint8_t */
    uint16_t span_state;       /* uint8_t */
    uint8_t slab;              /* the state of a slab; other states hold no blocks but the next one */
    uint8_t large;             /* the state of a span that is one block */

    /* A uint16_t for each page, by number. Of a page of a slab: how many used blocks touch it, and whether it
     * may be resident. */
    const void *pages; /* a pointer to that of number 0 */
    uint16_t page_users;
    uint16_t page_dirty;

    /* Classes, by number. */
    uint32_t class_bytes; /* from one to the next; it begins with the blocks' size, a uint32_t */
    const void *classes;
    const void *class_count; /* a uint32_t */

    /* Pointers to the segments, in which blocks are; each ends where access rights do. */
    const void *segments;
    const void *segment_count; /* a size_t */
    uint64_t segment_bytes;    /* from one pointer to the next */

    /* Pointers to ranges of other records, each of which ends where access rights do; NULL: none. And to
     * those of the depots. */
    const void *records[BLOCKS_LAYOUT_RANGES];
    const void *depots;
    uint64_t depot_count;
    uint64_t depot_bytes; /* from one pointer to the next */
};

#endif
