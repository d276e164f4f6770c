/*
 * Invalid frees that the server found. Its thread cannot report them: a report
 * may abort, and whatever then runs needs thread-local storage. So the next
 * client that passes by reports them. One writer at a time, which holds the
 * server's lock; any number of readers. All zero is empty.
 */
#ifndef CALM_OFFLOAD_MISUSE_QUEUE_H
#define CALM_OFFLOAD_MISUSE_QUEUE_H

#include "heap/heap.h"

#include <stdatomic.h>

#define MISUSE_QUEUE_RECORDS 8

struct misuse_queue {
    _Atomic(uint32_t) written; /* numbers of records, modulo 2^32 */
    _Atomic(uint32_t) read;
    struct {
        _Atomic(const void *) pointer;
        _Atomic(int) kind;
    } records[MISUSE_QUEUE_RECORDS];
};

/* Drops the record if the queue is full. */
static inline void misuse_queue_put(struct misuse_queue *queue, const struct misuse_record *misuse) {
    uint32_t written = atomic_load_explicit(&queue->written, memory_order_relaxed);
    if (written - atomic_load_explicit(&queue->read, memory_order_acquire) < MISUSE_QUEUE_RECORDS) {
        uint32_t slot = written % MISUSE_QUEUE_RECORDS;
        atomic_store_explicit(&queue->records[slot].pointer, misuse->pointer, memory_order_relaxed);
        atomic_store_explicit(&queue->records[slot].kind, (int)misuse->kind, memory_order_relaxed);
        atomic_store_explicit(&queue->written, written + 1, memory_order_release);
    }
}

static inline bool misuse_queue_is_empty(const struct misuse_queue *queue) {
    return atomic_load_explicit(&queue->written, memory_order_acquire) ==
           atomic_load_explicit(&queue->read, memory_order_relaxed);
}

/* False if the queue is empty. A record that is overwritten while it is read
 * was taken by another reader. */
static inline bool misuse_queue_take(struct misuse_queue *queue, struct misuse_record *misuse) {
    uint32_t read = atomic_load_explicit(&queue->read, memory_order_relaxed);
    do {
        if (atomic_load_explicit(&queue->written, memory_order_acquire) == read) {
            return false;
        }
        uint32_t slot = read % MISUSE_QUEUE_RECORDS;
        misuse->pointer = atomic_load_explicit(&queue->records[slot].pointer, memory_order_relaxed);
        misuse->kind = (enum misuse)atomic_load_explicit(&queue->records[slot].kind, memory_order_relaxed);
        misuse->late = true;
    } while (!atomic_compare_exchange_weak_explicit(&queue->read, &read, read + 1, memory_order_acq_rel,
                                                    memory_order_relaxed));
    return true;
}

#endif
