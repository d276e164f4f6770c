#include "heap/heap.h"

#include "heap/slab.h"

#include <string.h>

/* Moved blocks keep a mapping each; half of what a process may have is the application's. */
#define MOVED_SPANS_MOST 16384

bool heap_init(struct heap *heap, const struct size_classes *classes, size_t address_space,
               void (*misused)(enum misuse kind, const void *pointer)) {
    heap->classes = classes;
    heap->misused = misused;
    heap->runs.space = &heap->space;
    return space_init(&heap->space, address_space, (classes->blocks_most + 63) / 64);
}

static void note_misuse(struct heap *heap, enum misuse kind, const void *pointer) {
    heap->misuse[heap->misuses++ % MISUSE_NOTES] = (struct misuse_note){kind, pointer};
    if (heap->misused != NULL) {
        heap->misused(kind, pointer);
    }
}

static bool is_full(const struct heap *heap, const struct span *slab) {
    return slab->used_blocks == heap->classes->of[slab->class].slab_blocks;
}

static struct span *new_slab(struct heap *heap, uint32_t class) {
    bool clean;
    uint64_t made = heap->runs.huge_pages_made;
    struct span *span =
        runs_take(&heap->runs, heap->classes->of[class].slab_pages, 1, heap->slab_choice, NULL, &clean);
    heap->dirtied_pages += heap->runs.huge_pages_made - made;
    if (span != NULL) {
        slab_open(heap, span, class, clean);
    }
    return span;
}

/* The bin's current slab, with a free block; NULL if memory is short. */
static struct span *current_slab(struct heap *heap, uint32_t class) {
    struct slab_bin *bin = &heap->bins[class];
    if (bin->current != NULL && !is_full(heap, bin->current)) {
        return bin->current;
    }
    bin->current = bin->part_used;
    if (bin->current != NULL) {
        address_order_remove(&bin->part_used, bin->current);
    } else {
        bin->current = new_slab(heap, class);
    }
    return bin->current;
}

size_t heap_take_blocks(struct heap *heap, uint32_t class, void **blocks, size_t count) {
    size_t taken = 0;
    while (taken < count) {
        struct span *slab = current_slab(heap, class);
        if (slab == NULL) {
            break;
        }
        taken += slab_take(heap, slab, blocks + count - taken, count - taken);
    }
    slab_make_ready(heap);
    if (taken < count) {
        memmove(blocks, blocks + count - taken, taken * sizeof *blocks);
    }
    return taken;
}

/* A slab has less blocks in use than before: puts it where such a slab belongs. */
static void settle_slab(struct heap *heap, struct span *slab, bool was_full) {
    struct slab_bin *bin = &heap->bins[slab->class];
    if (slab->used_blocks == 0) {
        if (slab == bin->current) {
            bin->current = NULL;
        } else if (!was_full) {
            address_order_remove(&bin->part_used, slab);
        }
        slab_close(heap, slab);
    } else if (was_full && slab != bin->current) {
        address_order_insert(&bin->part_used, slab);
    }
}

/* Whether the page belongs to a free run, or to one on its way to be purged. */
static bool was_freed(const struct heap *heap, uint32_t page) {
    if (page == 0 || !space_is_usable(&heap->space, page)) {
        return false;
    }
    const struct span *span = space_span_of(&heap->space, page);
    return page - span->page < span->pages && span->state >= SPAN_DIRTY && span->state <= SPAN_PURGING;
}

/* Whether a purge has claimed the block, which then is free. */
static bool is_claimed(const struct heap *heap, const struct span *slab, const char *block, size_t size) {
    const struct purge_batch *batch = heap->claims;
    for (size_t i = 0; batch != NULL && i < batch->count; i++) {
        const char *start = batch->ranges[i].iov_base;
        if (batch->spans[i] == slab && block + size > start && block < start + batch->ranges[i].iov_len) {
            return true;
        }
    }
    return false;
}

static void put_bits(struct heap *heap, struct span *slab, size_t word, uint64_t bits) {
    bool was_full = is_full(heap, slab);
    slab_put(heap, slab, word, bits);
    settle_slab(heap, slab, was_full);
}

/* The slab that a pointer lies in, if any. */
static struct span *slab_at(const struct heap *heap, const void *pointer) {
    uint32_t page = space_page(&heap->space, pointer);
    return page == 0 || heap->space.class_of[page] == 0 ? NULL : space_span_of(&heap->space, page);
}

static void put_block(struct heap *heap, void *pointer) {
    struct span *slab = slab_at(heap, pointer);
    if (slab == NULL) {
        bool freed = was_freed(heap, space_page(&heap->space, pointer));
        note_misuse(heap, freed ? MISUSE_DOUBLE_FREE : MISUSE_INVALID_FREE, pointer);
        return;
    }
    const struct size_class *class = &heap->classes->of[slab->class];
    long block = slab_block_at(class, (size_t)((char *)pointer - slab->base));
    if (block < 0 || !slab_in_use(slab, (size_t)block) ||
        (slab->claimed && is_claimed(heap, slab, pointer, class->size))) {
        note_misuse(heap, block < 0 ? MISUSE_INVALID_FREE : MISUSE_DOUBLE_FREE, pointer);
        return;
    }
    put_bits(heap, slab, (size_t)block / 64, (uint64_t)1 << (block % 64));
}

/*
 * Of a block in use nothing that is read here changes. Of one that was freed before, the slab may become
 * another one meanwhile: so where it begins and its class are read once, and what is planned by them holds
 * if they are the slab's still under the lock.
 */
void heap_plan_puts(const struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count) {
    puts->count = 0;
    size_t i = 0;
    struct slab_bits *last = NULL;
    struct span *slab = NULL;
    char *base = NULL;
    uint8_t class = 0;
    size_t slab_bytes = 0;
    for (; i < count; i++) {
        if ((size_t)((char *)blocks[i] - base) >= slab_bytes) {
            slab = slab_at(heap, blocks[i]);
            base = slab == NULL ? NULL : *(char *volatile *)&slab->base;
            class = slab == NULL ? 0 : *(volatile uint8_t *)&slab->class;
            slab_bytes = (size_t)heap->classes->of[class].slab_pages << heap->space.page_shift;
        }
        const struct size_class *of = &heap->classes->of[class];
        long block = slab == NULL ? -1 : slab_block_at(of, (size_t)((char *)blocks[i] - base));
        size_t word = (size_t)block / 64;
        uint64_t bit = (uint64_t)1 << (block & 63);
        if (last != NULL && block >= 0 && last->slab == slab && last->base == base && last->word == word &&
            (last->bits & bit) == 0) {
            last->bits |= bit;
            last->count++;
            continue;
        }
        if (puts->count == HEAP_PUTS_MOST) {
            break;
        }
        last = &puts->of[puts->count++];
        *last = (struct slab_bits){.count = 1};
        if (block >= 0) {
            *last = (struct slab_bits){slab, base, bit, (uint16_t)word, 1, class};
            __builtin_prefetch(&slab->used_blocks, 1);
            __builtin_prefetch(&slab->allocated[word], 1);
            __builtin_prefetch(&heap->space.users_of[slab->page], 1);
        }
    }
    puts->planned = i;
}

/* Whether all of them surely are blocks in use, as planned: of a slab that has not come to another use since,
 * as it may if what is freed here was free before, and of which no purge has claimed blocks that are free. */
static bool are_in_use(const struct slab_bits *put) {
    const struct span *slab = put->slab;
    return slab != NULL && slab->state == SPAN_SLAB && !slab->claimed && slab->class == put->class &&
           slab->base == put->base && (put->bits & ~slab->allocated[put->word]) == 0;
}

void heap_put_planned(struct heap *heap, struct heap_puts *puts, void *const *blocks, size_t count) {
    for (;;) {
        void *const *block = blocks;
        for (size_t i = 0; i < puts->count; i++) {
            const struct slab_bits *put = &puts->of[i];
            if (are_in_use(put)) {
                put_bits(heap, put->slab, put->word, put->bits);
            } else {
                for (size_t each = 0; each < put->count; each++) {
                    put_block(heap, block[each]);
                }
            }
            block += put->count;
        }
        blocks += puts->planned;
        count -= puts->planned;
        if (count == 0) {
            return;
        }
        heap_plan_puts(heap, puts, blocks, count);
    }
}

void heap_put_blocks(struct heap *heap, void *const *blocks, size_t count) {
    struct heap_puts puts;
    heap_plan_puts(heap, &puts, blocks, count);
    heap_put_planned(heap, &puts, blocks, count);
}

void *heap_take_large(struct heap *heap, size_t pages, size_t align_pages, enum run_choice choice,
                      bool *zero) {
    uint64_t made = heap->runs.huge_pages_made;
    /* Among smaller ones the pages left out would be holes that nothing fits: docs/experiments.md. */
    bool spreads = heap->spreads && pages >= heap->runs.huge_pages;
    const struct colors *colors = spreads ? &heap->colors : NULL;
    struct span *span = runs_take(&heap->runs, pages, align_pages, choice, colors, zero);
    heap->dirtied_pages += heap->runs.huge_pages_made - made;
    if (span == NULL) {
        return NULL;
    }
    /* Moved pages are not faulted in. */
    heap->runs.faulted_pages += *zero && choice != RUN_FOR_MOVE ? pages : 0;
    span->state = SPAN_LARGE;
    span->offset = 0;
    span->colored = span->huge && spreads;
    if (span->colored) {
        colors_add(&heap->colors, runs_address_page(&heap->runs, span));
    }
    span->moved = false;
    span->ahead = false;
    span->ready = false;
    heap->used_pages += pages;
    heap->large_allocations++;
    return span->base;
}

/* Before a large block's span becomes free. */
static void forget_color(struct heap *heap, struct span *span) {
    if (span->colored) {
        colors_remove(&heap->colors, runs_address_page(&heap->runs, span));
    }
    span->colored = false;
}

/* Before the block's size changes. */
static void forget_ahead(struct heap *heap, struct span *span) {
    heap->ahead_pages -= span->ahead ? span->pages : 0;
    span->ahead = false;
}

/* The span of a large block that lies at an address, if it begins on that page. */
static struct span *large_on_page(const struct heap *heap, const void *address) {
    uint32_t page = space_page(&heap->space, address);
    if (page == 0 || !space_is_usable(&heap->space, page)) {
        return NULL;
    }
    struct span *span = space_span_of(&heap->space, page);
    return span->state == SPAN_LARGE && span->page == page ? span : NULL;
}

struct span *heap_large_span(const struct heap *heap, const void *block) {
    struct span *span = large_on_page(heap, block);
    return span != NULL && span->base + span->offset == block ? span : NULL;
}

struct span *heap_large_span_at(const struct heap *heap, const void *base) {
    struct span *span = large_on_page(heap, base);
    return span != NULL && span->base == base ? span : NULL;
}

void *heap_place_large(struct span *span, size_t offset) {
    span->offset = offset;
    return span->base + offset;
}

void heap_note_ahead(struct heap *heap, void *block) {
    struct span *span = heap_large_span(heap, block);
    span->ahead = true;
    heap->ahead_pages += span->pages;
}

enum put_large heap_put_large(struct heap *heap, void *block, struct span **renew) {
    struct span *span = heap_large_span(heap, block);
    if (span == NULL) {
        uint32_t page = space_page(&heap->space, block);
        bool freed = was_freed(heap, page);
        note_misuse(heap, freed ? MISUSE_DOUBLE_FREE : MISUSE_INVALID_FREE, block);
        return PUT_MISUSED;
    }
    forget_ahead(heap, span);
    forget_color(heap, span);
    span->state = SPAN_PURGING;
    heap->used_pages -= span->pages;
    heap->dirtied_pages += span->pages;
    if (span->moved) {
        heap->moved_spans--;
        heap->purging_pages += span->pages;
        *renew = span;
        return PUT_RENEW;
    }
    runs_put(&heap->runs, span, false);
    return PUT_DONE;
}

void heap_put_renewed(struct heap *heap, struct span *span, bool renewed) {
    heap->purging_pages -= span->pages;
    runs_put(&heap->runs, span, renewed);
}

bool heap_resize_large(struct heap *heap, struct span *span, size_t pages) {
    if (pages == span->pages) {
        return true;
    }
    forget_ahead(heap, span);
    if (pages < span->pages) {
        /* A moved block gives up its mapping as a whole: it is copied elsewhere, or stays a little too long.
         */
        if (span->moved) {
            return pages > span->pages / 2;
        }
        struct span *rest = runs_split(&heap->runs, span, pages);
        if (rest == NULL) {
            return true; /* stays as long as it is, which is no less than was asked */
        }
        heap->used_pages -= rest->pages;
        heap->dirtied_pages += rest->pages;
        space_mark_ends(&heap->space, span);
        rest->state = SPAN_PURGING;
        runs_put(&heap->runs, rest, false);
        return true;
    }
    size_t more = pages - span->pages;
    struct span *behind = runs_behind(&heap->runs, span);
    uint32_t end = behind == NULL ? span->page + span->pages : behind->page + behind->pages;
    if ((behind == NULL || behind->pages < more) && space_ends_at(&heap->space, end) &&
        runs_extend(&heap->runs, more)) {
        behind = runs_behind(&heap->runs, span);
    }
    if (behind == NULL || behind->pages < more) {
        return false;
    }
    /* What is clean in a huge region would become resident by more than the block takes. */
    bool clean = behind->state == SPAN_CLEAN;
    if (behind->huge != span->huge || (behind->huge && clean)) {
        return false;
    }
    runs_remove(&heap->runs, behind);
    if (behind->pages > more) {
        struct span *rest = runs_split(&heap->runs, behind, more);
        if (rest == NULL) {
            runs_put(&heap->runs, behind, clean);
            return false;
        }
        runs_put(&heap->runs, rest, clean);
    }
    span->pages += behind->pages;
    heap->used_pages += more;
    heap->runs.faulted_pages += clean ? more : 0;
    space_drop_span(&heap->space, behind);
    space_mark_ends(&heap->space, span);
    return true;
}

void heap_moved(struct heap *heap, struct span *from, struct span *to) {
    forget_ahead(heap, from);
    forget_color(heap, from);
    to->moved = true;
    to->offset = from->offset;
    heap->moves++;
    heap->moved_spans++;
    heap->used_pages -= from->pages;
    if (from->moved) {
        heap->moved_spans--;
    }
    from->moved = false;
    from->state = SPAN_PURGING;
    runs_put(&heap->runs, from, true);
}

bool heap_may_move(const struct heap *heap) {
    return heap->moved_spans < MOVED_SPANS_MOST;
}

static void add_range(struct heap *heap, struct purge_batch *batch, struct span *span, const char *base,
                      size_t pages) {
    batch->ranges[batch->count] = (struct iovec){(void *)base, pages << heap->space.page_shift};
    batch->spans[batch->count++] = span;
    batch->pages += pages;
    heap->purging_pages += pages;
}

/*
 * Takes a run out of its set, except for up to before pages at its front and whatever is behind the next
 * pages; without descriptors for those, all of it.
 */
static struct span *cut_run(struct heap *heap, struct span *run, size_t before, size_t pages) {
    runs_remove(&heap->runs, run);
    if (before > 0) {
        struct span *rest = runs_split(&heap->runs, run, before);
        if (rest != NULL) {
            space_mark_ends(&heap->space, rest);
            runs_put(&heap->runs, run, false);
            if (!run->huge) {
                /* It is as cold as what is taken of it. Nothing was there to be joined with. */
                span_ages_remove(&heap->runs.dirty_ages, run);
                span_ages_prepend(&heap->runs.dirty_ages, run);
            }
            run = rest;
        }
    }
    if (run->pages > pages) {
        struct span *rest = runs_split(&heap->runs, run, pages);
        if (rest != NULL) {
            space_mark_ends(&heap->space, run);
            runs_put(&heap->runs, rest, false);
        }
    }
    space_mark_ends(&heap->space, run);
    return run;
}

/*
 * Runs, the coldest first; of the last one its end, so that what stays lies low. Of a huge region all or
 * nothing, unless split: a huge page of which a part is given back stays whole until the kernel is short of
 * memory.
 */
static void take_runs(struct heap *heap, struct purge_batch *batch, size_t pages, bool split) {
    struct span *next;
    for (struct span *run = heap->runs.dirty_ages.coldest; run != NULL; run = next) {
        if (batch->pages >= pages || batch->count == PURGE_RANGES) {
            return;
        }
        next = run->age.hotter;
        size_t wanted = pages - batch->pages;
        size_t before = run->pages > wanted ? run->pages - wanted : 0;
        size_t count = run->pages - before;
        if (run->huge && !split) {
            size_t whole = runs_whole_regions(&heap->runs, run, &before);
            if (whole == 0) {
                continue;
            }
            size_t unit = heap->runs.huge_pages;
            count = (wanted + unit - 1) / unit * unit;
            count = count < whole ? count : whole;
        }
        run = cut_run(heap, run, before, count);
        add_range(heap, batch, run, run->base, run->pages);
    }
}

static void take_from_slabs(struct heap *heap, struct purge_batch *batch, size_t pages, bool huge) {
    while (batch->pages < pages && batch->count < PURGE_RANGES && heap->slab_ages[huge].coldest != NULL) {
        struct span *slab = heap->slab_ages[huge].coldest;
        bool was_full = is_full(heap, slab);
        size_t from = 0;
        size_t first;
        size_t count;
        for (;;) {
            size_t used = heap->used_pages;
            if (batch->count == PURGE_RANGES || !slab_claim(heap, slab, &from, &first, &count)) {
                break;
            }
            batch->claimed[batch->count] = (uint16_t)(heap->used_pages - used);
            heap->claimed_pages += heap->used_pages - used;
            heap->claims = batch;
            slab->claimed = true;
            add_range(heap, batch, slab, slab->base + (first << heap->space.page_shift), count);
        }
        /* Claimed blocks are in use: a slab without another one leaves the order, as when blocks are taken.
         */
        if (!was_full && is_full(heap, slab) && heap->bins[slab->class].current != slab) {
            address_order_remove(&heap->bins[slab->class].part_used, slab);
        }
    }
}

size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth) {
    batch->count = 0;
    batch->pages = 0;
    size_t most = PURGE_BYTES >> heap->space.page_shift;
    pages = pages < most ? pages : most;
    take_runs(heap, batch, pages, false);
    if (depth >= PURGE_SLABS) {
        take_from_slabs(heap, batch, pages, false);
    }
    if (depth >= PURGE_SPLIT) {
        take_runs(heap, batch, pages, true);
        take_from_slabs(heap, batch, pages, true);
    }
    return batch->pages;
}

void purge_batch_swap(struct purge_batch *batch, size_t a, size_t b) {
    struct iovec range = batch->ranges[a];
    struct span *span = batch->spans[a];
    uint16_t claimed = batch->claimed[a];
    batch->ranges[a] = batch->ranges[b];
    batch->spans[a] = batch->spans[b];
    batch->claimed[a] = batch->claimed[b];
    batch->ranges[b] = range;
    batch->spans[b] = span;
    batch->claimed[b] = claimed;
}

void heap_put_back(struct heap *heap, struct purge_batch *batch, size_t purged) {
    heap->claims = NULL;
    uint32_t shift = heap->space.page_shift;
    for (size_t i = 0; i < batch->count; i++) {
        struct span *span = batch->spans[i];
        size_t pages = batch->ranges[i].iov_len >> shift;
        heap->purging_pages -= pages;
        if (span->state == SPAN_SLAB) {
            bool was_full = is_full(heap, span);
            heap->claimed_pages -= batch->claimed[i];
            span->claimed = false;
            slab_return(heap, span, (size_t)((char *)batch->ranges[i].iov_base - span->base) >> shift, pages,
                        i < purged);
            settle_slab(heap, span, was_full);
        } else {
            runs_put(&heap->runs, span, i < purged);
        }
    }
}
