#include "heap/slab.h"

#include <string.h>

static const struct size_class *class_of(const struct heap *heap, const struct span *slab) {
    return &heap->classes->of[slab->class];
}

/* Counts of free dirty pages: the slab's, the heap's, and the list of slabs that have any. */
static void add_free_dirty(struct heap *heap, struct span *slab) {
    if (slab->free_dirty_pages++ == 0) {
        span_ages_append(&heap->slab_ages[slab->huge], slab);
    }
    heap->slab_dirty_pages++;
    heap->dirtied_pages++;
}

static void drop_free_dirty(struct heap *heap, struct span *slab) {
    if (--slab->free_dirty_pages == 0) {
        span_ages_remove(&heap->slab_ages[slab->huge], slab);
    }
    heap->slab_dirty_pages--;
}

void slab_make_ready(struct heap *heap) {
    if (heap->fresh_pages > 0) {
        size_t bytes = (size_t)heap->fresh_pages << heap->space.page_shift;
        heap->fresh_pages = 0;
        heap->make_ready(space_address(&heap->space, heap->fresh_page), bytes);
    }
}

/* The page will be touched and may not be resident: one stretch at a time. */
static void note_fresh(struct heap *heap, uint32_t page) {
    if (heap->fresh_pages > 0 && page == heap->fresh_page + heap->fresh_pages) {
        heap->fresh_pages++;
        return;
    }
    slab_make_ready(heap);
    heap->fresh_page = page;
    heap->fresh_pages = 1;
}

/* So many more blocks in use touch the page. touched: their owner will write to it. */
static void use_page(struct heap *heap, struct span *slab, size_t page, size_t blocks, bool touched) {
    uint16_t *users = &heap->space.users_of[slab->page + page];
    if ((*users & PAGE_USERS) == 0) {
        heap->used_pages++;
        if ((*users & PAGE_DIRTY) != 0) {
            drop_free_dirty(heap, slab);
        }
    }
    if (touched && (*users & PAGE_DIRTY) == 0) {
        heap->runs.faulted_pages++;
        if (heap->make_ready != NULL) {
            note_fresh(heap, (uint32_t)(users - heap->space.users_of));
        }
    }
    *users = (uint16_t)((*users + blocks) | (touched ? PAGE_DIRTY : 0));
}

static void leave_page(struct heap *heap, struct span *slab, size_t page, size_t blocks) {
    uint16_t *users = &heap->space.users_of[slab->page + page];
    *users = (uint16_t)(*users - blocks);
    if ((*users & PAGE_USERS) == 0) {
        heap->used_pages--;
        if ((*users & PAGE_DIRTY) != 0) {
            add_free_dirty(heap, slab);
        }
    }
}

/* Bits first to end - 1. */
static inline uint64_t bits_between(size_t first, size_t end) {
    return (~(uint64_t)0 >> (64 - (end - first))) << first;
}

enum change { CHANGE_USED, CHANGE_CLAIMED, CHANGE_FREED };

/* Tells the pages that the blocks touch, each once for all of them. */
static inline __attribute__((always_inline)) void
change_bits(struct heap *heap, struct span *slab, size_t word, uint64_t bits, enum change change) {
    const struct size_class *class = class_of(heap, slab);
    uint32_t shift = heap->space.page_shift;
    size_t start = word * 64;
    size_t lowest = start + (size_t)__builtin_ctzll(bits);
    size_t highest = start + 63 - (size_t)__builtin_clzll(bits);
    size_t page = lowest * class->size >> shift;
    size_t last = (highest * class->size + class->size - 1) >> shift;
    size_t first = size_class_block_at(class, page << shift);
    for (; page <= last; page++) {
        size_t next = size_class_block_at(class, (page + 1) << shift);
        size_t end = next + (next * class->size < (page + 1) << shift ? 1 : 0);
        uint64_t of_page =
            bits_between(first > start ? first - start : 0, end < start + 64 ? end - start : 64);
        uint64_t touching = bits & of_page;
        first = next;
        if (touching == 0) {
            continue;
        }
        size_t blocks = (size_t)__builtin_popcountll(touching);
        if (change == CHANGE_FREED) {
            leave_page(heap, slab, page, blocks);
        } else {
            use_page(heap, slab, page, blocks, change == CHANGE_USED);
        }
    }
    uint16_t count = (uint16_t)__builtin_popcountll(bits);
    if (change == CHANGE_FREED) {
        slab->allocated[word] &= ~bits;
        slab->used_blocks = (uint16_t)(slab->used_blocks - count);
    } else {
        slab->allocated[word] |= bits;
        slab->used_blocks = (uint16_t)(slab->used_blocks + count);
    }
}

void slab_put(struct heap *heap, struct span *slab, size_t word, uint64_t bits) {
    change_bits(heap, slab, word, bits, CHANGE_FREED);
}

/* Of the bits that are set the lowest, so many at most. There is one. */
static uint64_t lowest_bits(uint64_t bits, size_t count) {
    if (count >= 64) {
        return bits;
    }
    uint64_t run = bits_between(0, count) << __builtin_ctzll(bits);
    if ((bits & run) == run) {
        return run;
    }
    uint64_t others = bits;
    for (; count > 0 && others != 0; count--) {
        others &= others - 1;
    }
    return bits & ~others;
}

size_t slab_take(struct heap *heap, struct span *slab, void **end, size_t count) {
    const struct size_class *class = class_of(heap, slab);
    size_t taken = 0;
    for (size_t word = 0; word * 64 < class->slab_blocks && taken < count; word++) {
        size_t left = class->slab_blocks - word * 64;
        uint64_t bits = ~slab->allocated[word] & bits_between(0, left < 64 ? left : 64);
        if (bits == 0) {
            continue;
        }
        bits = lowest_bits(bits, count - taken);
        change_bits(heap, slab, word, bits, CHANGE_USED);
        char *base = slab->base + word * 64 * class->size;
        for (; bits != 0; bits &= bits - 1) {
            *(end - ++taken) = base + (size_t)__builtin_ctzll(bits) * class->size;
        }
    }
    return taken;
}

void slab_open(struct heap *heap, struct span *span, uint32_t class, bool clean) {
    struct space *space = &heap->space;
    span->state = SPAN_SLAB;
    span->class = (uint8_t) class;
    span->used_blocks = 0;
    span->free_dirty_pages = 0;
    memset(span->allocated, 0, space->span_bytes - sizeof *span);
    uint32_t number = space_span_number(space, span);
    for (uint32_t page = span->page; page < span->page + span->pages; page++) {
        space->span_of[page] = number;
        space->class_of[page] = (uint8_t) class;
        space->users_of[page] = clean ? 0 : PAGE_DIRTY;
        if (!clean) {
            add_free_dirty(heap, span);
            heap->dirtied_pages--; /* it was when it became free */
        }
    }
}

/* Ends the stretch of like pages that begins at page first of what is left of the slab. */
static size_t stretch(const uint16_t *users, size_t first, size_t end) {
    size_t page = first + 1;
    while (page < end && users[page] == users[first]) {
        page++;
    }
    return page;
}

void slab_close(struct heap *heap, struct span *slab) {
    struct space *space = &heap->space;
    if (slab->free_dirty_pages > 0) {
        heap->slab_dirty_pages -= slab->free_dirty_pages;
        slab->free_dirty_pages = 0;
        span_ages_remove(&heap->slab_ages[slab->huge], slab);
    }
    uint16_t *users = &space->users_of[slab->page];
    size_t pages = slab->pages;
    memset(&space->class_of[slab->page], 0, pages);
    slab->state = SPAN_PURGING;
    struct span *rest = slab;
    for (size_t page = 0; page < pages;) {
        bool clean = (users[page] & PAGE_DIRTY) == 0;
        size_t end = stretch(users, page, pages);
        struct span *part = rest;
        if (end < pages) {
            rest = runs_split(&heap->runs, part, end - page);
            if (rest == NULL) {
                /* No descriptor for a part of its own: all that is left counts as dirty, which is safe. */
                clean = false;
                end = pages;
            }
        }
        memset(&users[page], 0, (end - page) * sizeof *users);
        runs_put(&heap->runs, part, clean);
        page = end;
    }
}

/* Those that touch any of the pages. */
static void change_blocks_of(struct heap *heap, struct span *slab, size_t first_page, size_t pages,
                             enum change change) {
    const struct size_class *class = class_of(heap, slab);
    uint32_t shift = heap->space.page_shift;
    size_t block = size_class_block_at(class, first_page << shift);
    size_t end = size_class_block_at(class, ((first_page + pages) << shift) - 1) + 1;
    end = end < class->slab_blocks ? end : class->slab_blocks;
    while (block < end) {
        size_t word = block / 64;
        size_t stop = end < word * 64 + 64 ? end : word * 64 + 64;
        change_bits(heap, slab, word, bits_between(block % 64, stop - word * 64), change);
        block = stop;
    }
}

bool slab_claim(struct heap *heap, struct span *slab, size_t *from, size_t *first, size_t *pages) {
    const uint16_t *users = &heap->space.users_of[slab->page];
    size_t page = *from;
    while (page < slab->pages && users[page] != PAGE_DIRTY) {
        page++;
    }
    if (page == slab->pages) {
        return false;
    }
    *first = page;
    *from = stretch(users, page, slab->pages);
    *pages = *from - page;
    change_blocks_of(heap, slab, *first, *pages, CHANGE_CLAIMED);
    return true;
}

void slab_return(struct heap *heap, struct span *slab, size_t first, size_t pages, bool purged) {
    uint16_t *users = &heap->space.users_of[slab->page];
    if (purged) {
        for (size_t page = first; page < first + pages; page++) {
            users[page] = (uint16_t)(users[page] & PAGE_USERS);
        }
    } else {
        heap->dirtied_pages -= pages; /* they were before, and will be counted again */
    }
    change_blocks_of(heap, slab, first, pages, CHANGE_FREED);
}
