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

/* One more block in use touches the page. touched: its owner will write to it. */
static void use_page(struct heap *heap, struct span *slab, uint16_t *users, bool touched) {
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
    *users = (uint16_t)((*users + 1) | (touched ? PAGE_DIRTY : 0));
}

static void leave_page(struct heap *heap, struct span *slab, uint16_t *users) {
    (*users)--;
    if ((*users & PAGE_USERS) == 0) {
        heap->used_pages--;
        if ((*users & PAGE_DIRTY) != 0) {
            add_free_dirty(heap, slab);
        }
    }
}

/* Pages that a block touches, counted within the slab. */
static inline void pages_of(const struct heap *heap, const struct size_class *class, size_t block,
                            size_t *first, size_t *last) {
    size_t offset = block * class->size;
    *first = offset >> heap->space.page_shift;
    *last = (offset + class->size - 1) >> heap->space.page_shift;
}

static void use_block(struct heap *heap, struct span *slab, size_t block, bool touched) {
    size_t first;
    size_t last;
    pages_of(heap, class_of(heap, slab), block, &first, &last);
    slab->allocated[block / 64] |= (uint64_t)1 << (block % 64);
    slab->used_blocks++;
    for (size_t page = first; page <= last; page++) {
        use_page(heap, slab, &heap->space.users_of[slab->page + page], touched);
    }
}

void slab_put(struct heap *heap, struct span *slab, size_t block) {
    size_t first;
    size_t last;
    pages_of(heap, class_of(heap, slab), block, &first, &last);
    slab->allocated[block / 64] &= ~((uint64_t)1 << (block % 64));
    slab->used_blocks--;
    for (size_t page = first; page <= last; page++) {
        leave_page(heap, slab, &heap->space.users_of[slab->page + page]);
    }
}

size_t slab_take(struct heap *heap, struct span *slab, void **blocks, size_t count) {
    const struct size_class *class = class_of(heap, slab);
    size_t taken = 0;
    for (size_t word = 0; word * 64 < class->slab_blocks && taken < count; word++) {
        uint64_t free_bits = ~slab->allocated[word];
        size_t left = class->slab_blocks - word * 64;
        if (left < 64) {
            free_bits &= ((uint64_t)1 << left) - 1;
        }
        while (free_bits != 0 && taken < count) {
            size_t block = word * 64 + (size_t)__builtin_ctzll(free_bits);
            free_bits &= free_bits - 1;
            use_block(heap, slab, block, true);
            blocks[taken++] = slab->base + block * class->size;
        }
    }
    return taken;
}

long slab_block_at(const struct heap *heap, const struct span *slab, const void *pointer) {
    const struct size_class *class = class_of(heap, slab);
    size_t offset = (size_t)((const char *)pointer - slab->base);
    size_t block = (size_t)(((uint64_t)offset * class->inverse) >> 32);
    return block < class->slab_blocks && block * class->size == offset ? (long)block : -1;
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

/* Blocks that touch any of the pages. */
static void blocks_of(const struct heap *heap, const struct span *slab, size_t first_page, size_t pages,
                      size_t *first, size_t *end) {
    const struct size_class *class = class_of(heap, slab);
    size_t start = first_page << heap->space.page_shift;
    size_t stop = (first_page + pages) << heap->space.page_shift;
    *first = start / class->size;
    *end = (stop + class->size - 1) / class->size;
    if (*end > class->slab_blocks) {
        *end = class->slab_blocks;
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
    size_t block;
    size_t end;
    blocks_of(heap, slab, *first, *pages, &block, &end);
    for (; block < end; block++) {
        use_block(heap, slab, block, false);
    }
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
    size_t block;
    size_t end;
    blocks_of(heap, slab, first, pages, &block, &end);
    for (; block < end; block++) {
        slab_put(heap, slab, block);
    }
}
