#include "heap/slab.h"

#include "base/assert.h"
#include "base/size.h"
#include "heap/large_blocks.h"
#include "heap/marks.h"

#include <string.h>

static const struct size_class *slab_class(const struct heap *heap, const struct span *slab) {
    return &heap->classes->of[slab->size_class];
}

/* Add and remove a free dirty page: in the counts of the slab and of the heap,
 * and in the heap's list of slabs that have such a page. */
static void add_free_dirty(struct heap *heap, struct span *slab) {
    calm_assert(slab->state == SPAN_SLAB && slab->free_dirty_pages < slab->pages, slab->page);
    if (slab->free_dirty_pages++ == 0) {
        span_ages_append(&heap->slab_ages[slab->huge], slab);
    }
    heap->slab_dirty_pages++;
}

static void drop_free_dirty(struct heap *heap, struct span *slab) {
    calm_assert(slab->free_dirty_pages > 0 && heap->slab_dirty_pages > 0, slab->page);
    if (--slab->free_dirty_pages == 0) {
        span_ages_remove(&heap->slab_ages[slab->huge], slab);
    }
    heap->slab_dirty_pages--;
}

/* Adds blocks in use to the count of a page. `touched` means that their owners
 * will write to the page. */
static void use_page(struct heap *heap, struct span *slab, size_t page, size_t blocks, bool touched) {
    calm_assert(page < slab->pages && slab->state == SPAN_SLAB, slab->page, page);
    calm_assert((heap->space.users_of[slab->page + page] & PAGE_USERS) + blocks <= PAGE_USERS, page, blocks);
    uint16_t *users = &heap->space.users_of[slab->page + page];
    if ((*users & PAGE_USERS) == 0) {
        heap->used_pages++;
        if ((*users & PAGE_DIRTY) != 0) {
            drop_free_dirty(heap, slab);
        }
    }
    if (touched && (*users & PAGE_DIRTY) == 0) {
        heap->runs.faulted_pages++;
    }
    *users = (uint16_t)((*users + blocks) | (touched ? PAGE_DIRTY : 0));
}

static void leave_page(struct heap *heap, struct span *slab, size_t page, size_t blocks) {
    uint16_t *users = &heap->space.users_of[slab->page + page];
    calm_assert((*users & PAGE_USERS) >= blocks && page < slab->pages, slab->page, page, *users, blocks);
    *users = (uint16_t)(*users - blocks);
    if ((*users & PAGE_USERS) == 0) {
        calm_assert(heap->used_pages > 0);
        heap->used_pages--;
        if ((*users & PAGE_DIRTY) != 0) {
            heap->dirtied_pages++;
            add_free_dirty(heap, slab);
        }
    }
}

/* Returns a word with the bits from `first` to `end` - 1 set. */
static inline uint64_t bits_between(size_t first, size_t end) {
    calm_assert(first < end && end <= 64, first, end);
    return (~(uint64_t)0 >> (64 - (end - first))) << first;
}

enum change { CHANGE_USED, CHANGE_CLAIMED, CHANGE_FREED };

/* Makes blocks of one word of the bitmap used or free. Updates each page that
 * they touch once. */
static inline __attribute__((always_inline)) void
change_bits(struct heap *heap, struct span *slab, size_t word, uint64_t bits, enum change change) {
    const struct size_class *size_class = slab_class(heap, slab);
    uint32_t shift = heap->space.page_shift;
    size_t start = word * 64;
    calm_assert(bits != 0 && start < size_class->slab_blocks && slab->state == SPAN_SLAB, slab->page, word);
    calm_assert((slab->allocated[word] & bits) == (change == CHANGE_FREED ? bits : 0), slab->page, word);
    size_t lowest = start + (size_t)__builtin_ctzll(bits);
    size_t highest = start + 63 - (size_t)__builtin_clzll(bits);
    size_t page = lowest * size_class->size >> shift;
    size_t last = (highest * size_class->size + size_class->size - 1) >> shift;
    size_t first = size_class_block_at(size_class, page << shift);
    for (; page <= last; page++) {
        size_t next = size_class_block_at(size_class, (page + 1) << shift);
        size_t end = next + (next * size_class->size < (page + 1) << shift ? 1 : 0);
        uint64_t of_page =
            bits_between(first > start ? first - start : 0, end < start + 64 ? end - start : 64);
        uint64_t touching = bits & of_page;
        first = next;
        if (touching == 0) {
            continue;
        }
        size_t blocks = count_bits(touching);
        if (change == CHANGE_FREED) {
            leave_page(heap, slab, page, blocks);
        } else {
            use_page(heap, slab, page, blocks, change == CHANGE_USED);
        }
    }
    uint16_t count = (uint16_t)count_bits(bits);
    if (change == CHANGE_FREED) {
        slab->allocated[word] &= ~bits;
        slab->used_blocks = (uint16_t)(slab->used_blocks - count);
    } else {
        slab->allocated[word] |= bits;
        slab->used_blocks = (uint16_t)(slab->used_blocks + count);
    }
    calm_assert(slab->used_blocks <= size_class->slab_blocks, slab->page, slab->used_blocks);
}

/* Returns the lowest set bits, at most `count`. At least one bit is set. */
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
    calm_assert(slab->state == SPAN_SLAB && !slab_is_full(heap, slab) && count > 0, slab->page, slab->state);
    const struct size_class *size_class = slab_class(heap, slab);
    size_t taken = 0;
    for (size_t word = 0; word * 64 < size_class->slab_blocks && taken < count; word++) {
        size_t left = size_class->slab_blocks - word * 64;
        uint64_t bits = ~slab->allocated[word] & bits_between(0, size_min(left, 64));
        if (bits == 0) {
            continue;
        }
        bits = lowest_bits(bits, count - taken);
        change_bits(heap, slab, word, bits, CHANGE_USED);
        char *base = slab->base + word * 64 * size_class->size;
        for (; bits != 0; bits &= bits - 1) {
            *(end - ++taken) = base + (size_t)__builtin_ctzll(bits) * size_class->size;
        }
    }
    return taken;
}

void slab_open(struct heap *heap, struct span *span, uint32_t size_class, bool clean) {
    calm_assert(span->state == SPAN_TAKEN && span->free_dirty_pages == 0, span->page);
    calm_assert(size_class > 0 && size_class < heap->classes->count, size_class);
    calm_assert(span->pages == heap->classes->of[size_class].slab_pages, span->pages, size_class);
    struct space *space = &heap->space;
    span->state = SPAN_SLAB;
    span->used_blocks = 0;
    span->size_class = (uint8_t)size_class;
    uint32_t number = span_number(&space->spans, span);
    for (uint32_t page = span->page; page < span->page + span->pages; page++) {
        space->span_of[page] = number;
        space->class_of[page] = (uint8_t)size_class;
        space->users_of[page] = clean ? 0 : PAGE_DIRTY;
        if (!clean) {
            add_free_dirty(heap, span);
        }
    }
}

/* Returns the end of the pages from `first` on that have equal entries. */
static size_t stretch_end(const uint16_t *users, size_t first, size_t end) {
    size_t page = first + 1;
    while (page < end && users[page] == users[first]) {
        page++;
    }
    return page;
}

/* Turns an empty slab into free runs. All counts and bits of its descriptor are
 * 0 by then, as slab_open expects. */
static void close_slab(struct heap *heap, struct span *slab) {
    calm_assert(slab->state == SPAN_SLAB && slab->used_blocks == 0 && (!slab->claimed || heap->purge_is_lost),
                slab->page);
    calm_assert(heap->bins[slab->size_class].current != slab, slab->page);
    struct space *space = &heap->space;
    if (slab->free_dirty_pages > 0) {
        heap->slab_dirty_pages -= slab->free_dirty_pages;
        slab->free_dirty_pages = 0;
        span_ages_remove(&heap->slab_ages[slab->huge], slab);
    }
    uint16_t *users = &space->users_of[slab->page];
    size_t pages = slab->pages;
    memset(&space->class_of[slab->page], 0, pages);
    slab->state = SPAN_TAKEN;
    if (marks_has(slab, MARK_ANY)) {
        enum vm_renewed renewed = vm_renew(slab->base, pages << space->page_shift);
        memset(users, 0, pages * sizeof *users);
        atomic_store_explicit(&slab->marks, 0, memory_order_relaxed);
        heap->purging_pages += pages;
        heap_put_renewed(heap, slab, renewed);
        return;
    }
    struct span *rest = slab;
    for (size_t page = 0; page < pages;) {
        bool clean = (users[page] & PAGE_DIRTY) == 0;
        size_t end = stretch_end(users, page, pages);
        struct span *part = rest;
        if (end < pages) {
            rest = runs_split(&heap->runs, part, end - page);
            if (rest == NULL) {
                /* Without a descriptor for the rest, all of it counts as dirty,
                 * which is safe. */
                clean = false;
                end = pages;
            }
        }
        memset(&users[page], 0, (end - page) * sizeof *users);
        runs_put(&heap->runs, part, clean);
        page = end;
    }
}

/* Updates the bin of a slab after some of its blocks became free. */
static void update_bin(struct heap *heap, struct span *slab, bool was_full) {
    struct slab_bin *bin = &heap->bins[slab->size_class];
    if (slab->used_blocks == 0) {
        if (slab == bin->current) {
            bin->current = NULL;
        } else if (!was_full) {
            address_order_remove(&bin->part_used, slab);
        }
        close_slab(heap, slab);
    } else if (was_full && slab != bin->current) {
        address_order_insert(&bin->part_used, slab);
    }
}

void slab_put(struct heap *heap, struct span *slab, size_t word, uint64_t bits) {
    calm_assert(slab->state == SPAN_SLAB && bits != 0, slab->page, slab->state);
    bool was_full = slab_is_full(heap, slab);
    change_bits(heap, slab, word, bits, CHANGE_FREED);
    update_bin(heap, slab, was_full);
}

/* Makes all blocks that touch one of the pages used or free. */
static void change_blocks_of(struct heap *heap, struct span *slab, size_t first_page, size_t pages,
                             enum change change) {
    const struct size_class *size_class = slab_class(heap, slab);
    uint32_t shift = heap->space.page_shift;
    size_t block = size_class_block_at(size_class, first_page << shift);
    size_t end = size_class_block_at(size_class, ((first_page + pages) << shift) - 1) + 1;
    end = size_min(end, size_class->slab_blocks);
    while (block < end) {
        size_t word = block / 64;
        size_t stop = size_min(end, word * 64 + 64);
        change_bits(heap, slab, word, bits_between(block % 64, stop - word * 64), change);
        block = stop;
    }
}

bool slab_claim(struct heap *heap, struct span *slab, size_t *first, size_t *end) {
    const uint16_t *users = &heap->space.users_of[slab->page];
    size_t page = *end;
    while (page < slab->pages && users[page] != PAGE_DIRTY) {
        page++;
    }
    if (page == slab->pages) {
        return false;
    }
    calm_assert(slab->state == SPAN_SLAB && slab->free_dirty_pages > 0, slab->page);
    *first = page;
    *end = stretch_end(users, page, slab->pages);
    change_blocks_of(heap, slab, page, *end - page, CHANGE_CLAIMED);
    return true;
}

void slab_return(struct heap *heap, struct span *slab, size_t first, size_t pages, bool purged) {
    calm_assert(slab->state == SPAN_SLAB && first + pages <= slab->pages && pages > 0, slab->page, first,
                pages);
    bool was_full = slab_is_full(heap, slab);
    uint16_t *users = &heap->space.users_of[slab->page];
    if (purged) {
        for (size_t page = first; page < first + pages; page++) {
            users[page] = (uint16_t)(users[page] & PAGE_USERS);
        }
    } else {
        heap->dirtied_pages -= pages; /* they were counted before, and are again below */
    }
    change_blocks_of(heap, slab, first, pages, CHANGE_FREED);
    update_bin(heap, slab, was_full);
}
