#include "heap/purge_batch.h"

#include "base/assert.h"
#include "base/size.h"
#include "heap/slab.h"

static void add_range(struct heap *heap, struct purge_batch *batch, const char *base, size_t pages) {
    calm_assert(batch->count < PURGE_MAX_RANGES && pages > 0, batch->count, pages);
    calm_assert(((uintptr_t)base & (heap->space.page_size - 1)) == 0, base);
    batch->ranges[batch->count++] = (struct iovec){(void *)base, pages << heap->space.page_shift};
    batch->pages += pages;
    heap->purging_pages += pages;
}

/*
 * Takes dirty runs of at least this age, the coldest first. If a run is longer
 * than needed, takes its end, so that the remaining pages have low addresses. Takes huge-page
 * regions only as a whole, unless `split` is set. A huge page that is purged in
 * part stays whole until the kernel is short of memory.
 */
static void take_runs(struct heap *heap, struct purge_batch *batch, size_t pages, bool split,
                      uint16_t min_age) {
    struct span *next;
    for (struct span *run = heap->runs.dirty_ages.coldest; run != NULL; run = next) {
        if (batch->pages >= pages || batch->count == PURGE_MAX_RANGES ||
            runs_age(&heap->runs, run) < min_age) {
            return;
        }
        next = run->age.hotter;
        size_t wanted = pages - batch->pages;
        size_t skip = size_minus(run->pages, wanted);
        size_t count = run->pages - skip;
        if (run->huge && !split) {
            size_t whole = runs_whole_regions(&heap->runs, run, &skip);
            if (whole == 0) {
                continue;
            }
            size_t unit = heap->runs.region_pages;
            count = (wanted + unit - 1) / unit * unit;
            count = size_min(count, whole);
        }
        run = runs_carve_dirty(&heap->runs, run, skip, count);
        add_range(heap, batch, run->base, run->pages);
    }
}

static void take_from_slabs(struct heap *heap, struct purge_batch *batch, size_t pages, bool huge) {
    while (batch->pages < pages && batch->count < PURGE_MAX_RANGES && heap->slab_ages[huge].coldest != NULL) {
        struct span *slab = heap->slab_ages[huge].coldest;
        calm_assert(slab->state == SPAN_SLAB && slab->huge == huge && (!slab->claimed || heap->purge_is_lost),
                    slab->page);
        bool was_full = slab_is_full(heap, slab);
        size_t first;
        size_t end = 0;
        size_t used = heap->used_pages;
        size_t before = batch->count;
        while (batch->count < PURGE_MAX_RANGES && slab_claim(heap, slab, &first, &end)) {
            add_range(heap, batch, slab->base + (first << heap->space.page_shift), end - first);
        }
        heap->claimed_pages += heap->used_pages - used;
        heap->claims_begin = heap->claims == NULL ? before : heap->claims_begin;
        heap->claims_end = batch->count;
        heap->claims = batch;
        slab->claimed = true;
        /* Claimed blocks count as in use. A slab that they fill therefore
         * leaves the order of part-used slabs, like a slab whose last block is
         * taken. */
        if (!was_full && slab_is_full(heap, slab) && heap->bins[slab->size_class].current != slab) {
            address_order_remove(&heap->bins[slab->size_class].part_used, slab);
        }
    }
}

size_t heap_add_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth,
                      uint16_t min_age) {
    calm_assert(heap->claims == NULL || heap->claims == batch, heap->claims);
    calm_assert(batch->count <= PURGE_MAX_RANGES, batch->count);
    size_t before = batch->pages;
    pages = size_min(pages, PURGE_BYTES >> heap->space.page_shift);
    switch (depth) {
    case PURGE_RUNS:
        take_runs(heap, batch, pages, false, min_age);
        break;
    case PURGE_SLABS:
        take_from_slabs(heap, batch, pages, false);
        break;
    case PURGE_SPLIT:
        take_runs(heap, batch, pages, true, 0);
        take_from_slabs(heap, batch, pages, true);
        break;
    }
    calm_assert(batch->pages >= before, batch->pages, before);
    return batch->pages - before;
}

size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth) {
    calm_assert(heap->claims == NULL && heap->claimed_pages == 0, heap->claimed_pages);
    purge_batch_clear(batch);
    for (enum purge_depth next = PURGE_RUNS; next <= depth; next++) {
        heap_add_dirty(heap, batch, pages, next, 0);
    }
    return batch->pages;
}

int heap_coldest_age(const struct heap *heap) {
    const struct span *coldest = heap->runs.dirty_ages.coldest;
    return coldest == NULL ? -1 : runs_age(&heap->runs, coldest);
}

void heap_put_back(struct heap *heap, const struct purge_batch *batch) {
    calm_assert(batch->count <= PURGE_MAX_RANGES, batch->count);
    heap->claims = NULL;
    heap->claimed_pages = 0;
    for (size_t i = 0; i < batch->count; i++) {
        uint32_t page = space_page(&heap->space, batch->ranges[i].iov_base);
        if (page == 0) {
            continue;
        }
        struct span *span = space_span_of(&heap->space, page);
        size_t pages = batch->ranges[i].iov_len >> heap->space.page_shift;
        calm_assert(span->state == SPAN_SLAB || span->state == SPAN_TAKEN, span->page, span->state);
        calm_assert(heap->purging_pages >= pages, heap->purging_pages, pages);
        heap->purging_pages -= pages;
        if (span->state == SPAN_SLAB) {
            size_t offset = (size_t)((char *)batch->ranges[i].iov_base - span->base);
            span->claimed = false;
            slab_return(heap, span, offset >> heap->space.page_shift, pages, purge_batch_is_purged(batch, i));
        } else {
            runs_put(&heap->runs, span, purge_batch_is_purged(batch, i));
        }
    }
}

void heap_lose_purge(struct heap *heap) {
    heap->claims = NULL;
    heap->claimed_pages = 0;
    heap->purge_is_lost = true;
}

bool heap_claims(const struct heap *heap, const char *block, size_t size) {
    const struct purge_batch *batch = heap->claims;
    for (size_t i = heap->claims_begin; batch != NULL && i < heap->claims_end; i++) {
        const char *start = batch->ranges[i].iov_base;
        if (block + size > start && block < start + batch->ranges[i].iov_len) {
            return true;
        }
    }
    return false;
}
