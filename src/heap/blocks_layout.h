/*
 * The layout of the heap's records, by which another process
 * finds which blocks are in use. The reader takes no lock and does not stop the
 * program. The table of counters (os/counter_table.h) points to the layout.
 *
 * The layout has the addresses of the records and the offsets of their fields,
 * so a reader needs no header of this release. The reader reads each record at
 * a different moment, so records may contradict each other.
 */
#ifndef CALM_HEAP_BLOCKS_LAYOUT_H
#define CALM_HEAP_BLOCKS_LAYOUT_H

#include <stdint.h>

#define BLOCKS_LAYOUT_VERSION      3
#define BLOCKS_LAYOUT_RECORDS      3
#define BLOCKS_LAYOUT_HEAP_RECORDS 6

/* A new field goes to the end, and so changes `bytes`. A change of meaning
 * changes the version. */
struct blocks_layout {
    char magic[8]; /* "calmblks", without its NUL */
    uint32_t version;
    uint32_t bytes; /* the size of this struct */

    /* The heaps. The address of a pointer to the first; NULL before the first
     * allocation. A heap whose `page_bytes` is 0 has no blocks. */
    const void *heaps;
    const void *heap_count; /* a uint32_t */
    uint64_t heap_bytes;    /* the distance from one heap to the next */
    uint64_t page_bytes;    /* in a heap, the offset of a size_t */

    /* The descriptors of a heap's spans, by number. */
    uint64_t spans; /* in a heap, the offset of a pointer to the first; NULL before the first allocation */
    uint64_t spans_end;  /* of a size_t; all numbers ever used are below it */
    uint64_t span_bytes; /* of a size_t: the distance from one descriptor to the next */
    uint16_t span_page;  /* in a descriptor, the offset of a uint32_t: the number of the span's first page */
    uint16_t span_pages; /* of a uint32_t */
    uint16_t
        span_used_blocks; /* of a uint16_t; for a slab only, and includes blocks in CPU caches and depots */
    uint16_t span_class;  /* of a uint8_t */
    uint16_t span_state;  /* of a uint8_t */
    uint8_t slab;         /* the state of a slab; spans in other states, except `large`, hold no blocks */
    uint8_t large;        /* the state of a span that is one block */

    /* A uint16_t for each page, by number. For a page of a slab it has two
     * parts: the number of blocks in use that touch the page, and whether the
     * page may be resident. */
    uint64_t pages; /* in a heap, the offset of a pointer to the entry of page 0 */
    uint16_t page_users;
    uint16_t page_dirty;

    /* The size classes, by number. */
    uint32_t class_bytes; /* the distance from one class to the next; a class begins with its block size, a
                             uint32_t */
    const void *classes;
    const void *class_count; /* a uint32_t */

    /* Segments contain the blocks. In a heap, `segments` is the offset of the
     * pointer to the first one, and the others follow. A segment ends where
     * access rights end. */
    uint64_t segments;
    uint64_t segment_count; /* of a size_t */
    uint64_t segment_bytes; /* the distance from one pointer to the next */

    /* Pointers to ranges of other records, or NULL: their offsets in a heap, and
     * the addresses of those that all heaps share. A range ends where access
     * rights end. `depots` is the address of the first pointer to records of a
     * depot. */
    uint64_t heap_records[BLOCKS_LAYOUT_HEAP_RECORDS];
    const void *records[BLOCKS_LAYOUT_RECORDS];
    const void *depots;
    uint64_t depot_count;
    uint64_t depot_bytes; /* the distance from one pointer to the next */
};

#endif
