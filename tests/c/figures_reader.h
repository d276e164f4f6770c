/*
 * Reads the tables of figures (os/figures.h) of the process itself as another process would: from the notes
 * of its images on.
 */
#ifndef CALM_TESTS_FIGURES_READER_H
#define CALM_TESTS_FIGURES_READER_H

#include "check.h"
#include "os/figures.h"

#include <link.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

struct figures_search {
    const char *library;
    const struct figures *found;
};

static inline int figures_look(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    struct figures_search *search = context;
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
                const struct figures *figures = (const void *)(content + distance);
                if (strcmp(figures->library, search->library) == 0) {
                    search->found = figures;
                }
            }
            note = content + (sizes[1] + align - 1) / align * align;
        }
    }
    return 0;
}

static inline const struct figures *figures_of(const char *library) {
    struct figures_search search = {.library = library};
    dl_iterate_phdr(figures_look, &search);
    CHECK(search.found != NULL);
    CHECK(memcmp(search.found->magic, FIGURES_MAGIC, sizeof search.found->magic) == 0);
    CHECK_EQUAL(search.found->version, FIGURES_VERSION);
    CHECK_EQUAL(search.found->bytes,
                search.found->head_bytes + (size_t)search.found->count * search.found->figure_bytes);
    return search.found;
}

static inline uint64_t figures_word(const char *at, uint8_t bytes) {
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

static inline uint64_t figures_term(const struct figure *term) {
    const char *start = term->at;
    if (term->flags & FIGURE_THROUGH) {
        memcpy(&start, term->at, sizeof start);
        if (start == NULL) {
            return 0;
        }
    }
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
            uint64_t word =
                figures_word(start + term->offset + (size_t)row * term->row_stride + (size_t)i * term->stride,
                             term->bytes);
            uint16_t less = 0;
            uint32_t weight = 1;
            if (term->less != NULL) {
                memcpy(&less, (const char *)term->less + 2 * i, sizeof less);
            }
            if (term->weights != NULL) {
                memcpy(&weight, (const char *)term->weights + (size_t)i * term->weight_stride, sizeof weight);
            }
            sum += word > less ? (word - less) * weight : 0;
        }
    }
    return term->unit == FIGURE_PAGES ? sum * (uint64_t)sysconf(_SC_PAGESIZE) : sum;
}

/* The figure of a name, which must be there. */
static inline uint64_t figure_now(const struct figures *figures, const char *name) {
    const char *terms = (const char *)figures + figures->head_bytes;
    uint64_t value = 0;
    bool found = false;
    for (uint32_t i = 0; i < figures->count; i++) {
        const struct figure *term = (const void *)(terms + (size_t)i * figures->figure_bytes);
        CHECK(term->name[0] != '\0' && term->bytes > 0);
        if (strcmp(term->name, name) == 0) {
            uint64_t part = figures_term(term);
            value += term->flags & FIGURE_SUBTRACT ? 0 - part : part;
            found = true;
        }
    }
    if (!found) {
        fprintf(stderr, "there is no figure %s\n", name);
    }
    CHECK(found);
    return value;
}

#endif
