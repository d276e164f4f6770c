/*
 * The table of span descriptors: by number, with memory of its own, which can be purged where it describes
 * nothing.
 *
 * Unused descriptors are bits, not a list, so that their memory need not be touched. Number 0 is that of no
 * span: always unused. Part of struct space; single-owner, except span_at and span_number.
 */
#ifndef CALM_HEAP_SPAN_TABLE_H
#define CALM_HEAP_SPAN_TABLE_H

#include "heap/span.h"
#include "os/address_range.h"
#include "os/vm.h"

#include <sys/uio.h>

/* TABLE_FREE_WORDS: a set bit says that a word of TABLE_FREE_SPANS has one, which is an unused descriptor. */
enum table_part { TABLE_SPANS, TABLE_FREE_SPANS, TABLE_FREE_WORDS, TABLE_PARTS };

struct span_table {
    struct address_range memory[TABLE_PARTS];
    size_t span_bytes; /* from one descriptor to the next */
    size_t max_spans;
    size_t lowest_free_word; /* of TABLE_FREE_WORDS: those below have no bit set */
    size_t end;              /* numbers below have been in use */
    size_t unused;           /* of them, those that are not now */
    size_t dropped;          /* since span_table_take_idle last took some */
};

/* bitmap_words: of each descriptor. False if address space is short. */
bool span_table_init(struct span_table *table, size_t max_spans, size_t bitmap_words);
void span_table_release(struct span_table *table);

/* Releases what is reserved for more spans than that. */
void span_table_trim(struct span_table *table, size_t max_spans);

/* An unused descriptor, of the lowest number, zeroed; NULL if memory is short. */
struct span *span_table_take(struct span_table *table);
void span_table_drop(struct span_table *table, struct span *span);

static inline struct span *span_at(const struct span_table *table, uint32_t number) {
    return (struct span *)(void *)(table->memory[TABLE_SPANS].base + (size_t)number * table->span_bytes);
}

static inline uint32_t span_number(const struct span_table *table, const struct span *span) {
    return (uint32_t)((size_t)((const char *)span - table->memory[TABLE_SPANS].base) / table->span_bytes);
}

/*
 * Takes the unused descriptors on up to max_ranges ranges of whole pages, which then may be purged, and
 * span_table_put_idle returns them. Returns the number of ranges; 0 unless enough were dropped since the last
 * time to be worth it.
 */
size_t span_table_take_idle(struct span_table *table, struct iovec *ranges, size_t max_ranges);
void span_table_put_idle(struct span_table *table, const struct iovec *ranges, size_t count);

#endif
