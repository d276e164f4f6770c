#include "heap/span_table.h"

#include "base/assert.h"
#include "base/size.h"

#include <string.h>

#define MIN_IDLE_BYTES ((size_t)256 << 10) /* descriptors of fewer bytes are not worth a purge */

/* Returns the size of a part of the table for this number of spans. */
static size_t bytes_for(const struct span_table *table, int part, size_t spans) {
    return part == TABLE_SPANS        ? spans * table->span_bytes
           : part == TABLE_FREE_SPANS ? (spans / 64 + 1) * sizeof(uint64_t)
                                      : (spans / 4096 + 1) * sizeof(uint64_t);
}

static uint64_t *span_table_words(const struct span_table *table, enum table_part part) {
    return (uint64_t *)(void *)table->memory[part].base;
}

static bool reach(struct span_table *table, size_t spans) {
    bool reached = true;
    for (int part = 0; part < TABLE_PARTS; part++) {
        reached = reached && address_range_reach(&table->memory[part], bytes_for(table, part, spans));
    }
    return reached;
}

bool span_table_init(struct span_table *table, size_t max_spans, size_t bitmap_words) {
    table->span_bytes = sizeof(struct span) + bitmap_words * sizeof(uint64_t);
    table->max_spans = max_spans;
    table->end = 1;
    size_t bytes[TABLE_PARTS];
    for (int part = 0; part < TABLE_PARTS; part++) {
        bytes[part] = bytes_for(table, part, max_spans);
    }
    return address_ranges_reserve(table->memory, bytes, TABLE_PARTS) && reach(table, 1);
}

void span_table_release(struct span_table *table) {
    for (int part = 0; part < TABLE_PARTS; part++) {
        address_range_release(&table->memory[part]);
    }
}

void span_table_trim(struct span_table *table, size_t max_spans) {
    table->max_spans = size_min(max_spans, table->max_spans);
    for (int part = 0; part < TABLE_PARTS; part++) {
        address_range_trim(&table->memory[part], bytes_for(table, part, table->max_spans));
    }
}

static bool is_unused(const struct span_table *table, size_t number) {
    return (span_table_words(table, TABLE_FREE_SPANS)[number / 64] >> (number % 64) & 1) != 0;
}

/* Marks a descriptor as unused or in use, without touching it. */
static void span_table_mark(struct span_table *table, size_t number, bool unused) {
    calm_assert(number > 0 && number < table->end, number, table->end);
    calm_assert(is_unused(table, number) != unused, number, unused);
    uint64_t *bits = &span_table_words(table, TABLE_FREE_SPANS)[number / 64];
    uint64_t *word = &span_table_words(table, TABLE_FREE_WORDS)[number / 4096];
    uint64_t row = (uint64_t)1 << (number / 64 % 64);
    if (unused) {
        *bits |= (uint64_t)1 << (number % 64);
        *word |= row;
        table->unused++;
        table->lowest_free_word = size_min(table->lowest_free_word, number / 4096);
    } else {
        *bits &= ~((uint64_t)1 << (number % 64));
        *word &= *bits == 0 ? ~row : ~(uint64_t)0;
        table->unused--;
    }
}

struct span *span_table_take(struct span_table *table) {
    const uint64_t *words = span_table_words(table, TABLE_FREE_WORDS);
    size_t used_words = (table->end + 4095) / 4096;
    size_t word = table->lowest_free_word;
    while (word < used_words && words[word] == 0) {
        word++;
    }
    table->lowest_free_word = word;
    size_t number = table->end;
    if (word < used_words) {
        size_t row = word * 64 + (size_t)__builtin_ctzll(words[word]);
        number = row * 64 + (size_t)__builtin_ctzll(span_table_words(table, TABLE_FREE_SPANS)[row]);
        span_table_mark(table, number, false);
    } else if (number < table->max_spans && reach(table, number + 1)) {
        table->end++;
    } else {
        return NULL;
    }
    struct span *span = span_at(table, (uint32_t)number);
    calm_assert(number > 0 && number < table->end && number <= table->max_spans, number, table->end);
    memset(span, 0, table->span_bytes);
    return span;
}

void span_table_drop(struct span_table *table, struct span *span) {
    span->state = SPAN_UNUSED;
    table->dropped++;
    span_table_mark(table, span_number(table, span), true);
}

/* Returns the number of the first descriptor that is on a range, in part or
 * whole, and stores the number after the last in *end. */
static size_t spans_on(const struct span_table *table, const struct iovec *range, size_t *end) {
    size_t offset = (size_t)((const char *)range->iov_base - table->memory[TABLE_SPANS].base);
    *end = (offset + range->iov_len + table->span_bytes - 1) / table->span_bytes;
    return offset / table->span_bytes;
}

static void mark_ranges(struct span_table *table, const struct iovec *ranges, size_t count, bool unused) {
    for (size_t i = 0; i < count; i++) {
        size_t end;
        for (size_t number = spans_on(table, &ranges[i], &end); number < end; number++) {
            span_table_mark(table, number, unused);
        }
    }
}

size_t span_table_take_idle(struct span_table *table, struct iovec *ranges, size_t max_ranges) {
    size_t fewer = size_min(table->dropped, table->unused);
    if (fewer * table->span_bytes < MIN_IDLE_BYTES || table->unused < table->end / 2) {
        return 0;
    }
    calm_assert(table->unused < table->end, table->unused, table->end);
    table->dropped = 0;
    size_t count = 0;
    size_t page_size = vm_page_size();
    size_t pages = table->end * table->span_bytes / page_size;
    for (size_t page = 0; page < pages; page++) {
        struct iovec one = {table->memory[TABLE_SPANS].base + page * page_size, page_size};
        size_t end;
        size_t number = spans_on(table, &one, &end);
        while (number < end && is_unused(table, number)) {
            number++;
        }
        if (number < end) {
            continue;
        }
        struct iovec *last = count == 0 ? NULL : &ranges[count - 1];
        if (last != NULL && (char *)last->iov_base + last->iov_len == one.iov_base) {
            last->iov_len += one.iov_len;
        } else if (count < max_ranges) {
            ranges[count++] = one;
        }
    }
    mark_ranges(table, ranges, count, false);
    return count;
}

void span_table_put_idle(struct span_table *table, const struct iovec *ranges, size_t count) {
    calm_assert(count == 0 || ranges[0].iov_len > 0);
    mark_ranges(table, ranges, count, true);
}
