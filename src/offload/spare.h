/*
 * The spare: what clients on a virtual CPU freed and may soon want again.
 *
 * Blocks that leave a full stack come here before they go to the server, and from here before the stock is
 * asked: a program that frees and allocates more than its stacks hold, in turn, has its blocks back without
 * a word that travels between two CPUs' caches. There is a stack for each class and endpoint, of
 * SPARE_CLASS_BYTES at most, which belongs to whoever is in the endpoint. At the end of each of the
 * predictor's windows the server takes what was not wanted in it, the oldest blocks first; before it lends
 * the heap, all.
 */
#ifndef CALM_OFFLOAD_SPARE_H
#define CALM_OFFLOAD_SPARE_H

#include "offload/server.h"

#include <string.h>

/* The server's thread, or who is in the endpoint: what lies there. Any thread: about. */
static inline uint32_t spare_level(const struct endpoint *endpoint, uint32_t class) {
    return atomic_load_explicit(&endpoint->spares[class].count, memory_order_relaxed);
}

static inline void **spare_stack(const struct server *server, struct endpoint *endpoint, uint32_t class) {
    return (void **)(void *)(endpoint->words + server->spare_start[class]);
}

static inline void spare_set(struct endpoint *endpoint, uint32_t class, uint32_t count) {
    atomic_store_explicit(&endpoint->spares[class].count, count, memory_order_relaxed);
}

/* Up to count blocks, those freed last; returns how many. Who is in the endpoint. */
static inline size_t spare_pop(const struct server *server, struct endpoint *endpoint, uint32_t class,
                               void **blocks, size_t count) {
    uint32_t level = spare_level(endpoint, class);
    uint32_t got = level < count ? level : (uint32_t)count;
    if (got > 0) {
        struct spare *spare = &endpoint->spares[class];
        level -= got;
        memcpy(blocks, spare_stack(server, endpoint, class) + level, got * sizeof *blocks);
        spare_set(endpoint, class, level);
        spare->least = level < spare->least ? level : spare->least;
    }
    return got;
}

/* All of the blocks, or, where there is no room for them, none. Who is in the endpoint. */
static inline bool spare_push(const struct server *server, struct endpoint *endpoint, uint32_t class,
                              void *const *blocks, size_t count) {
    uint32_t level = spare_level(endpoint, class);
    if (level + count > server->spare_most[class]) {
        return false;
    }
    memcpy(spare_stack(server, endpoint, class) + level, blocks, count * sizeof *blocks);
    spare_set(endpoint, class, level + (uint32_t)count);
    return true;
}

/* Takes a magazine at most from the bottom of what was not wanted since the window began; returns how many
 * blocks. Who is in the endpoint. */
size_t spare_take_unwanted(const struct server *server, struct endpoint *endpoint, uint32_t class,
                           void **blocks);

/* A window begins: as far as is known, nothing that lies there is wanted. Who is in the endpoint. */
static inline void spare_begin_window(struct endpoint *endpoint, uint32_t class) {
    endpoint->spares[class].least = spare_level(endpoint, class);
}

/* Where each class's stack lies, from that word of an endpoint on, with class_bytes for each. Returns the
 * words that an endpoint needs for all. */
uint32_t spare_prepare(struct server *server, uint32_t word, size_t class_bytes);

#endif
