/*
 * A ring of words from one producer to one consumer; the caller ensures that
 * each is one thread at a time. It holds records of a header and a payload,
 * each complete or absent. All zero is empty.
 *
 * Each side writes one index, and reads the other's only when its copy of that
 * says full, or empty. The producer stores words, then the tail (release); the
 * consumer loads the tail (acquire), then the words, then stores the head
 * (release), which the producer loads (acquire) before it overwrites them.
 * Indices grow modulo 2^32; that of a word is taken modulo RING_WORDS.
 * tests/model/ring.pml has the proof.
 */
#ifndef CALM_OFFLOAD_RING_H
#define CALM_OFFLOAD_RING_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RING_WORDS 4096

struct ring {
    _Alignas(64) _Atomic(uint32_t) tail; /* the producer's */
    uint32_t head_seen;
    _Alignas(64) _Atomic(uint32_t) head; /* the consumer's */
    uint32_t tail_seen;
    _Alignas(64) uint64_t words[RING_WORDS];
};

/* The number of words of the payload: the upper half of the header. */
static inline size_t record_count(uint64_t header) {
    return (size_t)(header >> 32);
}

/*
 * Adds a record; false if it does not fit. sequenced: the store that publishes
 * it is sequentially consistent, for a producer that then checks whether the
 * consumer sleeps.
 */
bool ring_push(struct ring *ring, uint64_t header, const uint64_t *payload, bool sequenced);

/* The number of words that may be read. */
size_t ring_filled(struct ring *ring);

/* Any thread; exact for the consumer. The load is sequentially consistent, for
 * one that has announced that it will sleep. */
static inline bool ring_is_empty(const struct ring *ring) {
    return atomic_load_explicit(&ring->tail, memory_order_seq_cst) ==
           atomic_load_explicit(&ring->head, memory_order_relaxed);
}

/* Removes the first record, whose words are filled. Copies its payload, and
 * returns its header. */
uint64_t ring_pop(struct ring *ring, uint64_t *payload);

#endif
