/*
 * A ring of words from one producer to one consumer: records of a header and a payload, whole or not at all.
 *
 * Each side writes one index, on a cache line of its own, and keeps a copy of the other's, so that it looks
 * at the other's line only when the copy says full, or empty. The producer stores the words, then the tail
 * (release); the consumer loads the tail (acquire), then the words, and then stores the head (release), which
 * the producer loads (acquire) before it writes over what was read. Indices count without end; the place of a
 * word is its index modulo RING_WORDS. All zero is an empty ring.
 *
 * Each side is one thread at a time, which the caller sees to: clients by a lock. tests/model/ has the proof.
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

/*
 * Adds a record; false if there is no room for all of it. With sequenced, the store that publishes it takes
 * part in the one order of sequentially consistent operations: for a producer that then looks whether the
 * consumer sleeps.
 */
bool ring_push(struct ring *ring, uint64_t header, const uint64_t *payload, size_t count, bool sequenced);

/* Words that may be read; sequenced as above, for a consumer that has said that it is about to sleep. */
size_t ring_filled(struct ring *ring, bool sequenced);

/* Reads so many words, which must be filled, without taking them. */
void ring_peek(const struct ring *ring, size_t from, uint64_t *words, size_t count);

/* Takes so many words: they may be written over now. */
void ring_take(struct ring *ring, size_t count);

#endif
