/*
 * The heap's address space, and what is known of each page of it.
 *
 * One range, of twice the machine's memory, is reserved at the start. A pointer's page number, and by it all
 * metadata, follows from it by arithmetic; the metadata lies in ranges of its own. Where one great range
 * cannot be had (RLIMIT_AS, a locked address space), segments are reserved as they are needed, and a pointer
 * outside the first is looked up among them. The last, once it is free as a whole, can be let go for a longer
 * one.
 *
 * Page numbers count through all segments, with one in between that belongs to none, so that runs of two
 * segments never look adjacent. 0 is nobody's.
 *
 * Single-owner, but for what says otherwise.
 */
#ifndef CALM_HEAP_SPACE_H
#define CALM_HEAP_SPACE_H

#include "heap/span.h"
#include "os/address_space.h"

#include <stdatomic.h>
#include <stddef.h>
#include <sys/uio.h>

/* No block begins in between. */
#define SPACE_QUANTUM_SHIFT 4

#define SEGMENTS_MOST 256 /* a number fits into one byte */

/* Of a page of a slab: how many blocks that are not free touch it, whether it may be resident, and whether it
 * was purged. */
#define PAGE_DIRTY 0x8000U
#define PAGE_USERS 0x3fffU

#if defined(__x86_64__)
#define SPACE_PAGE_SHIFT(space) 12 /* the architecture's only one */
#else
#define SPACE_PAGE_SHIFT(space) ((space)->page_shift)
#endif

struct segment {
    struct os_region region;
    /* For any thread: what of it is known, or nothing, while the segment comes or goes. */
    _Atomic(uintptr_t) base;
    _Atomic(size_t) bytes;
    _Atomic(uint32_t) first_page;
    _Atomic(uint32_t) page_end; /* of those that are usable */
};

struct space {
    /* What the fast path of free reads: the first segment, and its pages' classes. */
    uintptr_t base;
    size_t quanta; /* its length, in steps at which a block may begin */
    uint8_t *first_classes;
    uint32_t page_shift;

    uint8_t *class_of;  /* the size class of a slab's page; 0 for any other */
    uint32_t *span_of;  /* all pages of a slab; first and last of any other span */
    uint16_t *users_of; /* pages of slabs: PAGE_DIRTY and PAGE_USERS */
    size_t page_size;

    struct os_region classes_region;
    struct os_region spans_of_region;
    struct os_region users_region;
    struct os_region spans_region;
    struct os_region free_spans_region;
    struct os_region free_words_region;
    size_t span_bytes;
    size_t spans_most;
    size_t lowest_free_word; /* of free_words: none below it has a bit set */

    size_t pages_most;
    size_t page_end;      /* numbers below are given to segments */
    size_t spans_end;     /* numbers below have been in use */
    size_t spans_unused;  /* of them, those that are not now */
    size_t spans_dropped; /* since space_take_idle last took some */
    size_t segment_bytes_least;
    _Atomic(size_t) segments;
    _Atomic(uint8_t) by_address[SEGMENTS_MOST]; /* the numbers of all segments, by their addresses */
    struct segment segment[SEGMENTS_MOST];
};

/* bitmap_words: of a descriptor. bytes: to reserve at most. False if even the metadata cannot be reserved. */
bool space_init(struct space *space, size_t bytes, size_t bitmap_words);

/* Makes at least pages more usable, in one piece, and returns the first one's number; 0 if memory is short.
 * *got says how many they are. */
uint32_t space_extend(struct space *space, size_t pages, size_t *got);

/* The program limits its address space to so many bytes: lets go what is only reserved, but for metadata of
 * a few times as much memory, should the limit be raised. Without effect where it is much more than what is
 * reserved, or where there are segments already. */
void space_limit(struct space *space, size_t bytes);

/* The usable pages of the last segment, up to *end; 0 if there is none that can be let go. */
uint32_t space_last(const struct space *space, uint32_t *end);

/* Lets the last segment go, of whose pages none is in use or in any run. */
void space_drop_last(struct space *space);

/* Whether page is the first that is not yet usable of the last segment. */
bool space_ends_at(const struct space *space, uint32_t page);

char *space_address(const struct space *space, uint32_t page);

/* The number of the page of an address in any segment but the first; 0 if it is in none. Any thread. */
uint32_t space_page_elsewhere(const struct space *space, uintptr_t address);

/* Whether there is anything to know of a page: a wild pointer may lead to one that was never used. Any
 * thread. */
bool space_is_usable(const struct space *space, uint32_t page);

/* The number of an address's page; 0 if it is not the heap's. Any thread. */
static inline uint32_t space_page(const struct space *space, const void *pointer) {
    uintptr_t offset = (uintptr_t)pointer - space->base;
    if (__builtin_expect(offset >> SPACE_QUANTUM_SHIFT < space->quanta, 1)) {
        return (uint32_t)(offset >> SPACE_PAGE_SHIFT(space)) + 1;
    }
    return space_page_elsewhere(space, (uintptr_t)pointer);
}

/* An unused descriptor, of the lowest number; NULL if memory is short. */
struct span *space_take_span(struct space *space);
void space_drop_span(struct space *space, struct span *span);

static inline struct span *space_span(const struct space *space, uint32_t number) {
    return (struct span *)(void *)(space->spans_region.base + (size_t)number * space->span_bytes);
}

static inline uint32_t space_span_number(const struct space *space, const struct span *span) {
    return (uint32_t)((size_t)((const char *)span - space->spans_region.base) / space->span_bytes);
}

/* The span that page is recorded for: its own, or nonsense within a large span or a free run. Never NULL. */
static inline struct span *space_span_of(const struct space *space, uint32_t page) {
    return space_span(space, space->span_of[page]);
}

/* Records the first and the last page. */
static inline void space_mark_ends(struct space *space, const struct span *span) {
    uint32_t number = space_span_number(space, span);
    space->span_of[span->page] = number;
    space->span_of[span->page + span->pages - 1] = number;
}

/*
 * Descriptors' memory that describes nothing: takes the unused descriptors of up to most ranges of whole
 * pages, which then may be purged, and space_put_idle gives them back. Returns the number of ranges; 0 unless
 * enough were dropped since the last time to be worth it.
 */
size_t space_take_idle(struct space *space, struct iovec *ranges, size_t most);
void space_put_idle(struct space *space, const struct iovec *ranges, size_t count);

size_t space_reserved_bytes(const struct space *space);

/* Bytes of metadata that may be resident. */
size_t space_metadata_bytes(const struct space *space);

#endif
