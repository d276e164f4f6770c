#include "offload/ring.h"

#include "base/assert.h"
#include "base/size.h"

#include <string.h>

static uint32_t own(const _Atomic(uint32_t) *index) {
    return atomic_load_explicit(index, memory_order_relaxed);
}

bool ring_push(struct ring *ring, uint64_t header, const uint64_t *payload, bool sequenced) {
    size_t count = record_count(header);
    uint32_t tail = own(&ring->tail);
    if (tail - ring->head_seen + count + 1 > RING_WORDS) {
        ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
        if (tail - ring->head_seen + count + 1 > RING_WORDS) {
            return false;
        }
    }
    calm_assert(tail - ring->head_seen + count + 1 <= RING_WORDS, tail, ring->head_seen, count);
    ring->words[tail % RING_WORDS] = header;
    if (count > 0) { /* else payload may be NULL */
        /* In two pieces if it wraps around. */
        size_t offset = (tail + 1) % RING_WORDS;
        size_t first = size_min(RING_WORDS - offset, count);
        memcpy(ring->words + offset, payload, first * sizeof *payload);
        memcpy(ring->words, payload + first, (count - first) * sizeof *payload);
    }
    atomic_store_explicit(&ring->tail, tail + 1 + (uint32_t)count,
                          sequenced ? memory_order_seq_cst : memory_order_release);
    return true;
}

size_t ring_filled(struct ring *ring) {
    uint32_t head = own(&ring->head);
    if (ring->tail_seen == head) {
        ring->tail_seen = atomic_load_explicit(&ring->tail, memory_order_acquire);
    }
    calm_assert(ring->tail_seen - head <= RING_WORDS, ring->tail_seen, head);
    return ring->tail_seen - head;
}

uint64_t ring_pop(struct ring *ring, uint64_t *payload) {
    uint32_t head = own(&ring->head);
    uint64_t header = ring->words[head % RING_WORDS];
    size_t count = record_count(header);
    size_t offset = (head + 1) % RING_WORDS;
    size_t first = size_min(RING_WORDS - offset, count);
    calm_assert(count < RING_WORDS, count, head);
    memcpy(payload, ring->words + offset, first * sizeof *payload);
    memcpy(payload + first, ring->words, (count - first) * sizeof *payload);
    atomic_store_explicit(&ring->head, head + 1 + (uint32_t)count, memory_order_release);
    return header;
}
