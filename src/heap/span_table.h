/*
 * The table of span descriptors, by number. Its memory can be purged where
 * descriptors are unused.
 *
 * Bits tell which descriptors are unused, so that a search does not touch their
 * memory. Number 0 belongs to no span, and its state is always SPAN_UNUSED.
 * Part of struct space. Single-owner, except for span_at and span_number.
 */
#ifndef CALM_HEAP_SPAN_TABLE_H
#define CALM_HEAP_SPAN_TABLE_H

#include "heap/span.h"
#include "os/address_range.h"
#include "os/vm.h"

#include <sys/uio.h>

/* TABLE_FREE_SPANS has a bit for each descriptor, set if it is unused.
 * TABLE_FREE_WORDS has a bit for each word of TABLE_FREE_SPANS, set if the word
 * is not 0. */
enum table_part { TABLE_SPANS, TABLE_FREE_SPANS, TABLE_FREE_WORDS, TABLE_PARTS };

struct span_table {
    struct address_range memory[TABLE_PARTS];
    size_t span_bytes; /* the distance from one descriptor to the next */
    size_t max_spans;
    size_t lowest_free_word; /* no word of TABLE_FREE_WORDS below it has a bit set */
    size_t end;              /* all numbers ever used are below it */
    size_t unused;           /* the number of descriptors below `end` that are unused */
    size_t dropped;          /* descriptors dropped since span_table_take_idle last took some */
};

/* Each descriptor gets a bitmap of bitmap_words words. Returns false if address
 * space is short. */
bool span_table_init(struct span_table *table, size_t max_spans, size_t bitmap_words);
void span_table_release(struct span_table *table);

/* Releases the reservation for more than max_spans spans. */
void span_table_trim(struct span_table *table, size_t max_spans);

/* Returns the unused descriptor of the lowest number, filled with zeros, or
 * NULL if memory is short. */
struct span *span_table_take(struct span_table *table);
void span_table_drop(struct span_table *table, struct span *span);

static inline struct span *span_at(const struct span_table *table, uint32_t number) {
    return (struct span *)(void *)(table->memory[TABLE_SPANS].base + (size_t)number * table->span_bytes);
}

static inline uint32_t span_number(const struct span_table *table, const struct span *span) {
    return (uint32_t)((size_t)((const char *)span - table->memory[TABLE_SPANS].base) / table->span_bytes);
}

/*
 * Takes the unused descriptors on up to max_ranges ranges of whole pages, so
 * that the caller may purge these pages. span_table_put_idle returns the
 * descriptors. Returns the number of ranges. Returns 0 if a purge is not worth
 * its cost, because few descriptors are unused, or few were dropped since the
 * last time.
 */
size_t span_table_take_idle(struct span_table *table, struct iovec *ranges, size_t max_ranges);
void span_table_put_idle(struct span_table *table, const struct iovec *ranges, size_t count);

#endif
