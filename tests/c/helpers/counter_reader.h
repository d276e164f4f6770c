/*
 * Reads the tables of counters (os/counter_table.h) of the process itself as another process would: from the
 * notes of its images on.
 */
#ifndef CALM_TESTS_COUNTER_READER_H
#define CALM_TESTS_COUNTER_READER_H

#include "check.h"
#include "os/counter_table.h"

#include <link.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

struct counter_table_search {
    const char *library;
    const struct counter_table *found;
};

static inline int counter_table_look(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    struct counter_table_search *search = context;
    for (size_t i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type != PT_NOTE) {
            continue;
        }
        const char *note = (const char *)(info->dlpi_addr + header->p_vaddr);
        const char *end = note + header->p_memsz;
        size_t align = header->p_align == 8 ? 8 : 4;
        while (note + 12 <= end) {
            uint32_t sizes[3];
            memcpy(sizes, note, sizeof sizes);
            const char *content = note + 12 + (sizes[0] + align - 1) / align * align;
            if (sizes[0] == 10 && strcmp(note + 12, "calmalloc") == 0 && sizes[1] == 8) {
                int64_t distance;
                memcpy(&distance, content, sizeof distance);
                const struct counter_table *table = (const void *)(content + distance);
                if (strcmp(table->library, search->library) == 0) {
                    search->found = table;
                }
            }
            note = content + (sizes[1] + align - 1) / align * align;
        }
    }
    return 0;
}

static inline const struct counter_table *counter_table_of(const char *library) {
    struct counter_table_search search = {.library = library};
    dl_iterate_phdr(counter_table_look, &search);
    CHECK(search.found != NULL);
    CHECK(memcmp(search.found->magic, COUNTER_TABLE_MAGIC, sizeof search.found->magic) == 0);
    CHECK_EQUAL(search.found->version, COUNTER_TABLE_VERSION);
    CHECK_EQUAL(search.found->bytes, sizeof *search.found);
    CHECK_EQUAL(search.found->term_bytes, sizeof *search.found->terms);
    return search.found;
}

static inline uint64_t counter_word(const char *at, uint8_t bytes) {
    uint8_t one;
    uint32_t four;
    uint64_t eight;
    switch (bytes) {
    case 1:
        memcpy(&one, at, 1);
        return one;
    case 4:
        memcpy(&four, at, 4);
        return four;
    default:
        CHECK_EQUAL(bytes, 8);
        memcpy(&eight, at, 8);
        return eight;
    }
}

/* The sum of a term's words at one address. */
static inline uint64_t counter_words(const struct counter_term *term, const char *start) {
    uint32_t rows = 1;
    if (term->rows != NULL) {
        memcpy(&rows, term->rows, sizeof rows);
    }
    const char *present = NULL;
    if (term->present != NULL) {
        memcpy(&present, term->present, sizeof present);
    }
    uint64_t sum = 0;
    for (uint32_t row = 0; row < rows; row++) {
        if (term->present != NULL &&
            (present == NULL || present[term->present_offset + (size_t)row * term->present_stride] == 0)) {
            continue;
        }
        for (uint32_t i = 0; i < (term->count > 0 ? term->count : 1); i++) {
            const char *at = start + term->offset + (size_t)row * term->row_stride + (size_t)i * term->stride;
            uint64_t word = counter_word(at, term->bytes);
            uint64_t ones = UINT64_MAX >> (64 - 8 * term->bytes);
            uint64_t base =
                term->base_offset == 0 ? 0 : ones - counter_word(at + term->base_offset, term->bytes);
            uint32_t weight = 1;
            if (term->weights != NULL) {
                memcpy(&weight, (const char *)term->weights + (size_t)i * term->weight_stride, sizeof weight);
            }
            sum += word > base ? (word - base) * weight : 0;
        }
    }
    return sum;
}

static inline uint64_t counter_term_value(const struct counter_term *term) {
    uint64_t sum = term->pointers == 0 ? counter_words(term, term->at) : 0;
    for (uint32_t i = 0; i < term->pointers; i++) {
        const char *start;
        memcpy(&start, (const char *)term->at + (size_t)i * term->pointer_stride, sizeof start);
        sum += start == NULL ? 0 : counter_words(term, start);
    }
    return term->unit == COUNTER_PAGES   ? sum * (uint64_t)sysconf(_SC_PAGESIZE)
           : term->unit == COUNTER_WORDS ? sum / 8
                                         : sum;
}

/* The value of a counter, which must be there. */
static inline uint64_t counter_now(const struct counter_table *table, const char *name) {
    uint64_t value = 0;
    bool found = false;
    for (uint64_t i = 0; i < table->count; i++) {
        const struct counter_term *term = &table->terms[i];
        CHECK(term->name[0] != '\0' && term->bytes > 0);
        if (strcmp(term->name, name) == 0) {
            uint64_t part = counter_term_value(term);
            value += term->flags & COUNTER_SUBTRACT ? 0 - part : part;
            found = true;
        }
    }
    if (!found) {
        fprintf(stderr, "there is no counter %s\n", name);
    }
    CHECK(found);
    return value;
}

#endif
