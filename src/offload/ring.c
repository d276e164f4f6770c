#include "offload/ring.h"

#include "base/size.h"

#include <string.h>

static uint32_t own(const _Atomic(uint32_t) *index) {
    return atomic_load_explicit(index, memory_order_relaxed);
}

/* In two pieces if the payload wraps around. */
static void copy_in(struct ring *ring, uint32_t index, const uint64_t *words, size_t count) {
    size_t offset = index % RING_WORDS;
    size_t first = size_min(RING_WORDS - offset, count);
    memcpy(ring->words + offset, words, first * sizeof *words);
    memcpy(ring->words, words + first, (count - first) * sizeof *words);
}

bool ring_push(struct ring *ring, uint64_t header, const uint64_t *payload, size_t count, bool sequenced) {
    uint32_t tail = own(&ring->tail);
    if (tail - ring->head_seen + count + 1 > RING_WORDS) {
        ring->head_seen = atomic_load_explicit(&ring->head, memory_order_acquire);
        if (tail - ring->head_seen + count + 1 > RING_WORDS) {
            return false;
        }
    }
    ring->words[tail % RING_WORDS] = header;
    if (count > 0) { /* else payload may be NULL */
        copy_in(ring, tail + 1, payload, count);
    }
    atomic_store_explicit(&ring->tail, tail + 1 + (uint32_t)count,
                          sequenced ? memory_order_seq_cst : memory_order_release);
    return true;
}

size_t ring_filled(struct ring *ring, bool sequenced) {
    uint32_t head = own(&ring->head);
    if (ring->tail_seen == head || sequenced) {
        ring->tail_seen =
            atomic_load_explicit(&ring->tail, sequenced ? memory_order_seq_cst : memory_order_acquire);
    }
    return ring->tail_seen - head;
}

void ring_peek(const struct ring *ring, size_t from, uint64_t *words, size_t count) {
    size_t offset = (own(&ring->head) + from) % RING_WORDS;
    size_t first = size_min(RING_WORDS - offset, count);
    memcpy(words, ring->words + offset, first * sizeof *words);
    memcpy(words + first, ring->words, (count - first) * sizeof *words);
}

void ring_take(struct ring *ring, size_t count) {
    atomic_store_explicit(&ring->head, own(&ring->head) + (uint32_t)count, memory_order_release);
}
