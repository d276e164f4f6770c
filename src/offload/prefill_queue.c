#include "offload/prefill_queue.h"

#include <string.h>

#define CACHE_LINE_BYTES 64

static size_t magazine_words(const struct endpoint_layout *layout, uint32_t class) {
    return 1 + (size_t)layout->classes->of[class].batch;
}

void prefill_queue_lay_out(struct endpoint_layout *layout) {
    for (uint32_t class = 1; class < layout->classes->count; ++class) {
        size_t magazines = MAX_PREFILL_CLASS_BYTES / prefill_queue_charge(&layout->classes->of[class]);
        magazines = size_max(size_min(magazines, MAX_PREFILLED_MAGAZINES), 2);
        size_t depth = 2;
        while (depth < magazines) {
            depth *= 2;
        }
        layout->queue_start[class] = layout->words;
        layout->max_magazines[class] = (uint8_t)magazines;
        layout->queue_depth[class] = (uint8_t)depth;
        layout->words += (uint32_t)(depth * magazine_words(layout, class));
    }
}

static struct magazine *magazine_at(const struct endpoint_layout *layout, struct endpoint *endpoint,
                                    uint32_t class, uint32_t index) {
    size_t slot = index & (layout->queue_depth[class] - 1U);
    size_t word = layout->queue_start[class] + slot * magazine_words(layout, class);
    return (struct magazine *)(void *)(endpoint->words + word);
}

static struct prefilled_block *block_at(struct endpoint *endpoint, uint32_t queue, uint32_t index) {
    return &endpoint->large[queue - SIZE_CLASSES][index % LARGE_QUEUE_BLOCKS];
}

static uint32_t load(const _Atomic(uint32_t) *index) {
    return atomic_load_explicit(index, memory_order_relaxed);
}

static bool is_filled(const _Atomic(uint64_t) *filled, uint32_t index) {
    return atomic_load_explicit(filled, memory_order_acquire) == (uint64_t)index + 1;
}

bool prefill_queue_put(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue,
                       const struct prefill_item *item) {
    bool large = prefill_queue_is_large(queue);
    if (prefill_queue_level(endpoint, queue) >= (large ? LARGE_QUEUE_BLOCKS : layout->queue_depth[queue])) {
        return false;
    }
    uint32_t put = load(&endpoint->put[queue]);
    _Atomic(uint64_t) *filled;
    if (large) {
        struct prefilled_block *slot = block_at(endpoint, queue, put);
        slot->block = item->blocks[0];
        slot->pages = item->pages;
        slot->zero = item->zero;
        filled = &slot->filled;
    } else {
        struct magazine *slot = magazine_at(layout, endpoint, queue, put);
        memcpy(slot->blocks, item->blocks, layout->classes->of[queue].batch * sizeof *slot->blocks);
        filled = &slot->filled;
    }
    atomic_store_explicit(filled, (uint64_t)put + 1, memory_order_release);
    atomic_store_explicit(&endpoint->put[queue], put + 1, memory_order_release);
    return true;
}

size_t prefill_queue_withdraw(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue,
                              void **blocks) {
    if (prefill_queue_level(endpoint, queue) == 0) {
        return 0;
    }
    uint32_t taken = load(&endpoint->taken[queue]);
    size_t count = 1;
    if (prefill_queue_is_large(queue)) {
        blocks[0] = block_at(endpoint, queue, taken)->block;
    } else {
        count = layout->classes->of[queue].batch;
        memcpy(blocks, magazine_at(layout, endpoint, queue, taken)->blocks, count * sizeof *blocks);
    }
    atomic_store_explicit(&endpoint->taken[queue], taken + 1, memory_order_release);
    return count;
}

/* The next slot lies in the server's cache, and is transferred while the client uses this one. */
static void prefetch(const void *slot, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += CACHE_LINE_BYTES) {
        __builtin_prefetch((const char *)slot + offset);
    }
}

size_t prefill_queue_take(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t class,
                          void **blocks, size_t count) {
    uint32_t taken = load(&endpoint->taken[class]);
    size_t batch = layout->classes->of[class].batch;
    size_t got = 0;
    const struct magazine *magazine = magazine_at(layout, endpoint, class, taken);
    while (is_filled(&magazine->filled, taken) && (got == 0 || got + batch <= count)) {
        memcpy(blocks + got, magazine->blocks, batch * sizeof *blocks);
        got += batch;
        taken++;
        magazine = magazine_at(layout, endpoint, class, taken);
    }
    if (got > 0) {
        atomic_store_explicit(&endpoint->taken[class], taken, memory_order_release);
        prefetch(magazine, magazine_words(layout, class) * sizeof(uint64_t));
    }
    count_one(got > 0 ? &endpoint->counts.hits : &endpoint->counts.misses);
    return got;
}

void *prefill_queue_take_large(struct endpoint *endpoint, uint64_t pages, bool *zero) {
    uint32_t queue = prefill_queue_of_pages(pages);
    uint32_t taken = load(&endpoint->taken[queue]);
    const struct prefilled_block *slot = block_at(endpoint, queue, taken);
    if (!is_filled(&slot->filled, taken) || slot->pages != pages) {
        count_one(&endpoint->counts.misses);
        return NULL;
    }
    void *block = slot->block;
    *zero = slot->zero;
    atomic_store_explicit(&endpoint->taken[queue], taken + 1, memory_order_release);
    count_one(&endpoint->counts.hits);
    prefetch(block_at(endpoint, queue, taken + 1), sizeof *slot);
    return block;
}

bool prefill_queue_is_empty(const struct endpoint_layout *layout, struct endpoint *endpoint, uint32_t queue) {
    uint32_t taken = load(&endpoint->taken[queue]);
    bool large = prefill_queue_is_large(queue);
    return !is_filled(large ? &block_at(endpoint, queue, taken)->filled
                            : &magazine_at(layout, endpoint, queue, taken)->filled,
                      taken);
}
