/*
 * The heap's address space: its segments, page numbers, and what is known of each page.
 *
 * One range, of twice the machine's memory, is reserved at the start. A pointer's page number, and by it all
 * metadata, follows by arithmetic; the metadata is in ranges of its own. Where one long range cannot be had
 * (RLIMIT_AS, a locked address space), segments are reserved as they are needed, and a pointer outside the
 * first is looked up among them. What is free and clean of them can be released again: a whole segment,
 * either end of it, or a part within, which leaves two segments.
 *
 * The pages of a segment have consecutive numbers. At least one between those of two segments belongs to
 * neither, so that runs of two segments never look adjacent. Numbers are given again once their segment is
 * gone. No page has number 0.
 *
 * Single-owner, except for functions marked "any thread": for those, whose caller has a block that is in use.
 */
#ifndef CALM_HEAP_SPACE_H
#define CALM_HEAP_SPACE_H

#include "base/assert.h"
#include "heap/span_table.h"
#include "os/address_range.h"
#include "os/vm.h"

#include <stdatomic.h>
#include <stddef.h>

/* Blocks begin at multiples of this. */
#define SPACE_QUANTUM_SHIFT 4

#define MAX_SEGMENTS 256 /* a number fits into one byte */

/* Of a page of a slab: whether it may be resident, and how many blocks in use touch it. */
#define PAGE_DIRTY 0x8000U
#define PAGE_USERS 0x3fffU

#if defined(__x86_64__)
#define SPACE_PAGE_SHIFT(space) 12 /* the architecture's only one */
#else
#define SPACE_PAGE_SHIFT(space) ((space)->page_shift)
#endif

/* A slot for one: without a region it is empty. */
struct segment {
    struct address_range region;
    /* For any thread: what is known of it, or nothing, while the segment is added or released. */
    _Atomic(uintptr_t) base;
    _Atomic(size_t) bytes;
    _Atomic(uint32_t) first_page;
    _Atomic(uint32_t) page_end; /* of those that are usable */
};

/* In which segments are ordered: by base, and by first_page. Empty slots are last. */
enum segment_order { BY_ADDRESS, BY_PAGE, SEGMENT_ORDERS };

enum page_table { CLASS_TABLE, SPAN_TABLE, USER_TABLE, PAGE_TABLES };

struct space {
    /* What the fast path of free reads: the first segment, and its pages' classes. */
    uintptr_t base;
    size_t quanta; /* its length, in steps at which a block may begin; 0 if all segments are short */
    uint8_t *first_classes;
    uint32_t page_shift;

    /* By page number; each begins page_tables[...]. */
    uint8_t *class_of;  /* the size class of a slab's page; 0 for any other */
    uint32_t *span_of;  /* all pages of a slab; first and last of any other span */
    uint16_t *users_of; /* pages of slabs: PAGE_DIRTY and PAGE_USERS */
    size_t page_size;

    struct address_range page_tables[PAGE_TABLES];
    struct span_table spans;

    size_t max_pages;         /* numbers are below that */
    bool limited;             /* address space is short: what is free is better released */
    size_t growing;           /* the slot of the segment whose reserved end may be made usable; or none */
    _Atomic(size_t) segments; /* slots beyond are empty */
    _Atomic(size_t) splits;   /* of segments: what is in use of one may be in another slot since */
    _Atomic(uint8_t) order[SEGMENT_ORDERS][MAX_SEGMENTS]; /* numbers of slots */
    struct segment segment[MAX_SEGMENTS];
};

/* Reserves at most so many bytes. bitmap_words: of each descriptor. False if there is not even metadata. */
bool space_init(struct space *space, size_t bytes, size_t bitmap_words);

/* Makes at least so many pages more usable, in one piece. Returns the number of the first, and how many they
 * are; 0 if memory is short. */
uint32_t space_extend(struct space *space, size_t pages, size_t *extended);

/* The program limits its address space to so many bytes: releases what is only reserved, except for the
 * metadata of a few times as much memory, in case the limit is raised. Without effect where the limit is much
 * more than what is reserved, or where segments are short already. */
void space_limit(struct space *space, size_t bytes);

/*
 * Releases usable pages that are clean and in no run, so that they are no longer the heap's: of a short
 * segment any, of the long one its end. False, and nothing changed, if that cannot be.
 */
bool space_release(struct space *space, uint32_t page, size_t pages);

/* The usable pages of a slot's segment, up to *end; 0 if it has none. */
uint32_t space_segment(const struct space *space, size_t number, uint32_t *end);

/* Where the usable pages end that space_extend would extend; 0 if there are none. */
uint32_t space_end(const struct space *space);

/* Makes usable pages at that end, from page on, reserved ones again. They are in no run, and hold no memory.
 * False if mappings are short. */
bool space_retract(struct space *space, uint32_t page);

/* Whether page follows the usable pages of the segment that grows. */
bool space_ends_at(const struct space *space, uint32_t page);

char *space_address(const struct space *space, uint32_t page);

/* The number of the page of an address in any segment but the first; 0 if it is in none. Any thread. */
uint32_t space_page_elsewhere(const struct space *space, uintptr_t address);

/* Whether there is metadata of a page: a wild pointer may lead to one that was never used. Any thread. */
bool space_is_usable(const struct space *space, uint32_t page);

/* The number of an address's page; 0 if it is not the heap's. Any thread. */
static inline uint32_t space_page(const struct space *space, const void *pointer) {
    uintptr_t offset = (uintptr_t)pointer - space->base;
    if (__builtin_expect(offset >> SPACE_QUANTUM_SHIFT < space->quanta, 1)) {
        return (uint32_t)(offset >> SPACE_PAGE_SHIFT(space)) + 1;
    }
    return space_page_elsewhere(space, (uintptr_t)pointer);
}

/* The span that page is recorded for: its own, or an arbitrary one within a large span or a free run. Never
 * NULL. */
static inline struct span *space_span_of(const struct space *space, uint32_t page) {
    return span_at(&space->spans, space->span_of[page]);
}

/* Records the first and the last page. */
static inline void space_mark_ends(struct space *space, const struct span *span) {
    calm_assert(span->page > 0 && span->pages > 0, span->page, span->pages);
    uint32_t number = span_number(&space->spans, span);
    space->span_of[span->page] = number;
    space->span_of[span->page + span->pages - 1] = number;
}

size_t space_reserved_bytes(const struct space *space);

/* Bytes of metadata that may be resident. */
size_t space_metadata_bytes(const struct space *space);

#endif
