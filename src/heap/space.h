/*
 * The heap's address space: its segments, page numbers, and the metadata of
 * each page.
 *
 * At its start, the heap reserves one range of at least twice the machine's
 * memory. The number of a pointer's page is computed from the pointer. All
 * metadata is in ranges of its own, and is found by this number. If no long
 * range can be had (RLIMIT_AS, a locked address space), the heap reserves
 * segments as it needs them, and finds a pointer's segment by a search. The
 * heap can release free, clean pages of such a segment again: the whole
 * segment, either end of it, or a part within, which leaves two segments.
 *
 * The pages of a segment have consecutive numbers. At least one number between
 * those of two segments is unused, so that runs of two segments never look
 * adjacent. The numbers of a released segment are used again. No page has
 * number 0.
 *
 * Single-owner, except for functions marked "any thread". A thread that calls
 * such a function owns a block in use.
 */
#ifndef CALM_HEAP_SPACE_H
#define CALM_HEAP_SPACE_H

#include "base/assert.h"
#include "heap/span_table.h"
#include "os/address_range.h"
#include "os/vm.h"

#include <stdatomic.h>
#include <stddef.h>

/* All blocks begin at multiples of a quantum, 1 << SPACE_QUANTUM_SHIFT
 * bytes. */
#define SPACE_QUANTUM_SHIFT 4

#define MAX_SEGMENTS 256 /* the number of a slot fits into one byte */

/* The entry of a slab's page: whether the page may be resident, and the number
 * of blocks in use that touch it. */
#define PAGE_DIRTY 0x8000U
#define PAGE_USERS 0x3fffU

#if defined(__x86_64__)
#define SPACE_PAGE_SHIFT(space) 12 /* the only page size of the architecture */
#else
#define SPACE_PAGE_SHIFT(space) ((space)->page_shift)
#endif

/* A slot for a segment. A slot without a region is empty. */
struct segment {
    struct address_range region;
    /* Any thread reads these fields. While the owner adds or releases the
     * segment, a lookup finds the segment or nothing. */
    _Atomic(uintptr_t) base;
    _Atomic(size_t) bytes;
    _Atomic(uint32_t) first_page;
    _Atomic(uint32_t) page_end; /* the number after the last usable page */
};

/*
 * The parts of one long range, each of which is the only segment of one space.
 * All parts have the same length, a power of two, so the number of a pointer's
 * part is computed from the pointer. The classes of the pages of all parts are
 * in one table. At the end of each part are pages that are never usable.
 *
 * The fast path of free reads these words. They describe the only space if
 * there are no parts.
 */
#define SPACE_MAX_PARTS 64

struct page_map {
    uintptr_t base;
    size_t quanta; /* the length of the range, in quanta; 0 if there is none */
    uint8_t *first_classes;
    uint64_t page_shift; /* a word, so that aarch64 loads it along with first_classes */
    uint32_t part_shift; /* binary logarithm of the bytes of a part */
    unsigned parts;      /* 0: the range belongs to one space */
};

/* The orders of the segments: by base and by first_page. Empty slots come last
 * in both. */
enum segment_order { BY_ADDRESS, BY_PAGE, SEGMENT_ORDERS };

enum page_table { CLASS_TABLE, SPAN_TABLE, USER_TABLE, PAGE_TABLES };

struct space {
    /* What the fast path of free reads: the first segment, and the classes of
     * its pages. */
    uintptr_t base;
    size_t quanta; /* the length of the segment, in quanta; 0 if all segments are short */
    uint8_t *first_classes;
    uint32_t page_shift;

    /* Tables by page number. Each starts at the base of one of page_tables. */
    uint8_t *class_of;  /* the size class of a page of a slab; 0 for other pages */
    uint32_t *span_of;  /* numbers of spans: for all pages of a slab, else for the first and last page */
    uint16_t *users_of; /* PAGE_DIRTY and PAGE_USERS of pages of slabs */
    size_t page_size;

    struct address_range page_tables[PAGE_TABLES];
    struct span_table spans;

    bool is_part;             /* the first segment is a part, and there is no other */
    size_t max_pages;         /* all page numbers are below it */
    bool limited;             /* address space is short, so free pages are better released */
    size_t growing;           /* the slot of the segment that space_extend extends, or MAX_SEGMENTS */
    _Atomic(size_t) segments; /* all slots from this number on are empty */
    _Atomic(size_t) splits;   /* how often a segment was split; a split moves used pages to another slot */
    _Atomic(uint8_t) order[SEGMENT_ORDERS][MAX_SEGMENTS]; /* the numbers of the slots, in order */
    struct segment segment[MAX_SEGMENTS];
};

/* Reserves at most `bytes`. Each descriptor gets a bitmap of bitmap_words
 * words. Returns false if there is no room even for the metadata. */
bool space_init(struct space *space, size_t bytes, size_t bitmap_words);

/* Reserves a long range of this number of parts, and fills the map. Each part
 * has at most `bytes`. Returns false if address space is short or limited. Only
 * the owner of the process's heaps calls it, once, before there are threads
 * that use them. */
bool space_reserve_parts(struct page_map *map, unsigned parts, size_t bytes);

/* Releases what space_reserve_parts reserved. No space uses a part. */
void space_unreserve_parts(struct page_map *map);

/* space_init for the space of one part. */
bool space_init_part(struct space *space, const struct page_map *map, unsigned part, size_t bitmap_words);

/* Releases the parts from this number on, which no space uses. */
void space_release_parts(struct page_map *map, unsigned from);

/* Releases the address space of one part, which no space uses. The map still
 * has the part. */
void space_release_part(const struct page_map *map, unsigned part);

/* Makes at least this number of further pages usable, in one piece. Returns the
 * number of the first page, and stores their count in *extended. Returns 0 if
 * memory is short. */
uint32_t space_extend(struct space *space, size_t pages, size_t *extended);

/* Adapts to a new limit on the program's address space, in bytes. Releases
 * address space that is only reserved. Keeps metadata for a few times as much
 * memory as the limit, since the program may raise it. Does nothing if the
 * limit is far above the reserved bytes, or if all segments are short. */
void space_limit(struct space *space, size_t bytes);

/*
 * Releases usable pages, which must be clean and in no run, so that they no
 * longer belong to the heap. A short segment can release any of its pages, the
 * long one only its end. If the pages cannot be released, returns false and
 * changes nothing.
 */
bool space_release(struct space *space, uint32_t page, size_t pages);

/* Returns the first usable page of a slot's segment, and stores the number
 * after the last in *end. Returns 0 if there is none. */
uint32_t space_segment(const struct space *space, size_t number, uint32_t *end);

/* Returns the number after the last usable page of the segment that
 * space_extend extends, or 0 if there is none. */
uint32_t space_end(const struct space *space);

/* Turns usable pages into reserved ones, from `page` to space_end. They must be
 * in no run and hold no memory. Returns false if the process has too many
 * mappings. */
bool space_retract(struct space *space, uint32_t page);

/* Returns whether `page` is the first one behind the usable pages of the
 * growing segment. */
bool space_ends_at(const struct space *space, uint32_t page);

char *space_address(const struct space *space, uint32_t page);

/* Returns the number of an address's page by a search of all segments, or 0 if
 * no segment contains the address. Any thread. */
uint32_t space_page_elsewhere(const struct space *space, uintptr_t address);

/* Returns whether a page has metadata. An invalid pointer may lead to a page
 * that never had any. Any thread. */
bool space_is_usable(const struct space *space, uint32_t page);

/* Returns the number of the part that contains the address, or `parts` if none
 * does. Any thread. */
static inline unsigned page_map_part(const struct page_map *map, const void *pointer) {
    uintptr_t offset = (uintptr_t)pointer - map->base;
    return offset >> SPACE_QUANTUM_SHIFT < map->quanta ? (unsigned)(offset >> map->part_shift) : map->parts;
}

/* Returns the number of an address's page, or 0 if the address is not the
 * heap's. Any thread. */
static inline uint32_t space_page(const struct space *space, const void *pointer) {
    uintptr_t offset = (uintptr_t)pointer - space->base;
    if (__builtin_expect(offset >> SPACE_QUANTUM_SHIFT < space->quanta, 1)) {
        return (uint32_t)(offset >> SPACE_PAGE_SHIFT(space)) + 1;
    }
    return space_page_elsewhere(space, (uintptr_t)pointer);
}

/* Returns the span in the entry of a page, never NULL. Within a large span or a
 * free run, it may be any span. */
static inline struct span *space_span_of(const struct space *space, uint32_t page) {
    return span_at(&space->spans, space->span_of[page]);
}

/* Sets the entries of the span's first and last page. */
static inline void space_mark_ends(struct space *space, const struct span *span) {
    calm_assert(span->page > 0 && span->pages > 0, span->page, span->pages);
    uint32_t number = span_number(&space->spans, span);
    space->span_of[span->page] = number;
    space->span_of[span->page + span->pages - 1] = number;
}

size_t space_reserved_bytes(const struct space *space);

/* Returns the bytes of metadata that may be resident. */
size_t space_metadata_bytes(const struct space *space);

#endif
