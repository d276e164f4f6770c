#include "offload/prefill_queue.h"

#include "base/assert.h"

#include <string.h>

#define CACHE_LINE_BYTES 64

static void lay_out(struct endpoint_layout *layout, uint32_t queue, size_t content_words, size_t blocks,
                    size_t max_ready) {
    size_t depth = 2;
    while (depth < max_ready) {
        depth *= 2;
    }
    layout->queues[queue] = (struct queue_layout){layout->words, (uint16_t)content_words, (uint16_t)blocks,
                                                  (uint8_t)depth, (uint8_t)max_ready};
    layout->words += (uint32_t)(depth * (1 + content_words));
}

void prefill_queue_lay_out(struct endpoint_layout *layout) {
    /* First, so that each of their slots lies in one cache line. */
    for (uint32_t queue = SIZE_CLASSES; queue < QUEUES; queue++) {
        lay_out(layout, queue, sizeof(struct prefilled_block) / sizeof(uint64_t), 1, LARGE_QUEUE_BLOCKS);
    }
    for (uint32_t size_class = 1; size_class < layout->classes->count; ++size_class) {
        const struct size_class *of = &layout->classes->of[size_class];
        size_t magazines = MAX_PREFILL_CLASS_BYTES / prefill_queue_charge(of);
        magazines = size_max(size_min(magazines, MAX_PREFILLED_MAGAZINES), 2);
        lay_out(layout, size_class, of->batch, of->batch, magazines);
    }
}

static size_t content_bytes(const struct endpoint *endpoint, uint32_t queue) {
    return endpoint->layout->queues[queue].content_words * sizeof(uint64_t);
}

static struct prefill_slot *slot_at(struct endpoint *endpoint, uint32_t queue, uint32_t index) {
    const struct queue_layout *layout = &endpoint->layout->queues[queue];
    size_t slot = index & (layout->depth - 1U);
    return (struct prefill_slot *)(void *)(endpoint->words + layout->start +
                                           slot * (1U + layout->content_words));
}

static uint32_t prefill_queue_load(const _Atomic(uint32_t) *index) {
    return atomic_load_explicit(index, memory_order_relaxed);
}

static bool is_filled(const struct prefill_slot *slot, uint32_t index) {
    return atomic_load_explicit(&slot->filled, memory_order_acquire) == (uint64_t)index + 1;
}

bool prefill_queue_put(struct endpoint *endpoint, const struct request *request) {
    uint32_t queue = prefill_queue_for(request);
    if (prefill_queue_level(endpoint, queue) >= endpoint->layout->queues[queue].depth) {
        return false;
    }
    uint32_t put = prefill_queue_load(&endpoint->put[queue]);
    calm_assert(put - prefill_queue_load(&endpoint->taken[queue]) <= endpoint->layout->queues[queue].depth,
                queue, put);
    struct prefill_slot *slot = slot_at(endpoint, queue, put);
    if (prefill_queue_is_large(queue)) {
        slot->item.large = (struct prefilled_block){request->blocks[0], request->pages, request->zero};
    } else {
        memcpy(slot->item.blocks, request->blocks, content_bytes(endpoint, queue));
    }
    atomic_store_explicit(&slot->filled, (uint64_t)put + 1, memory_order_release);
    atomic_store_explicit(&endpoint->put[queue], put + 1, memory_order_release);
    return true;
}

/* The next slot lies in the server's cache, and is transferred while the client
 * uses this one. */
static void prefetch(const struct prefill_slot *slot, size_t content_bytes) {
    for (size_t offset = 0; offset < sizeof slot->filled + content_bytes; offset += CACHE_LINE_BYTES) {
        __builtin_prefetch((const char *)slot + offset);
    }
}

size_t prefill_queue_take(struct endpoint *endpoint, struct request *request) {
    uint32_t queue = prefill_queue_for(request);
    bool large = prefill_queue_is_large(queue);
    size_t each = endpoint->layout->queues[queue].blocks;
    uint32_t taken = prefill_queue_load(&endpoint->taken[queue]);
    const struct prefill_slot *slot = slot_at(endpoint, queue, taken);
    size_t got = 0;
    while (is_filled(slot, taken) && (got == 0 || got + each <= request->count) &&
           (!large || slot->item.large.pages == request->pages)) {
        memcpy(request->blocks + got, slot->item.blocks, each * sizeof *request->blocks);
        request->zero = large && slot->item.large.zero;
        got += each;
        taken++;
        slot = slot_at(endpoint, queue, taken);
    }
    if (got > 0) {
        calm_assert(got % each == 0 && got <= MAX_MAGAZINE_BLOCKS, queue, got, each);
        atomic_store_explicit(&endpoint->taken[queue], taken, memory_order_release);
        prefetch(slot, content_bytes(endpoint, queue));
    }
    return got;
}

bool prefill_queue_is_empty(struct endpoint *endpoint, uint32_t queue) {
    uint32_t taken = prefill_queue_load(&endpoint->taken[queue]);
    return !is_filled(slot_at(endpoint, queue, taken), taken);
}
