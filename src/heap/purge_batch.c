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
 * Takes dirty runs, the coldest first. If a run is longer than needed, takes
 * its end, so that the remaining pages have low addresses. Takes huge-page
 * regions only as a whole, unless `split` is set. A huge page that is purged in
 * part stays whole until the kernel is short of memory.
 */
static void take_runs(struct heap *heap, struct purge_batch *batch, size_t pages, bool split) {
    struct span *next;
    for (struct span *run = heap->runs.dirty_ages.coldest; run != NULL; run = next) {
        if (batch->pages >= pages || batch->count == PURGE_MAX_RANGES) {
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
        while (batch->count < PURGE_MAX_RANGES && slab_claim(heap, slab, &first, &end)) {
            add_range(heap, batch, slab->base + (first << heap->space.page_shift), end - first);
        }
        heap->claimed_pages += heap->used_pages - used;
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

size_t heap_take_dirty(struct heap *heap, struct purge_batch *batch, size_t pages, enum purge_depth depth) {
    calm_assert(heap->claims == NULL && heap->claimed_pages == 0, heap->claimed_pages);
    batch->count = 0;
    batch->pages = 0;
    size_t max_pages = PURGE_BYTES >> heap->space.page_shift;
    pages = size_min(pages, max_pages);
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

void heap_put_back(struct heap *heap, struct purge_batch *batch, size_t purged) {
    calm_assert(purged <= batch->count && batch->count <= PURGE_MAX_RANGES, purged, batch->count);
    heap->claims = NULL;
    heap->claimed_pages = 0;
    for (size_t i = 0; i < batch->count; i++) {
        struct span *span = purge_batch_span(heap, &batch->ranges[i]);
        size_t pages = batch->ranges[i].iov_len >> heap->space.page_shift;
        calm_assert(span->state == SPAN_SLAB || span->state == SPAN_TAKEN, span->page, span->state);
        calm_assert(heap->purging_pages >= pages, heap->purging_pages, pages);
        heap->purging_pages -= pages;
        if (span->state == SPAN_SLAB) {
            size_t offset = (size_t)((char *)batch->ranges[i].iov_base - span->base);
            span->claimed = false;
            slab_return(heap, span, offset >> heap->space.page_shift, pages, i < purged);
        } else {
            runs_put(&heap->runs, span, i < purged);
        }
    }
}

void heap_lose_purge(struct heap *heap) {
    heap->claims = NULL;
    heap->claimed_pages = 0;
    heap->purge_is_lost = true;
}

bool purge_batch_claims(const struct purge_batch *batch, const char *block, size_t size) {
    for (size_t i = 0; batch != NULL && i < batch->count; i++) {
        const char *start = batch->ranges[i].iov_base;
        if (block + size > start && block < start + batch->ranges[i].iov_len) {
            return true;
        }
    }
    return false;
}
