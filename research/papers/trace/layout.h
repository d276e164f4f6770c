/* Two allocators that differ only in where the free blocks of a page are written down (NextGen-Malloc,
 * section 3.1.2 and figure 2): in the first 8 bytes of each free block, one linked to the next (aggregated),
 * or as indices of 16 bits in a table of their own (segregated). They give the same blocks in the same order.
 * What they load and store goes to the model of a machine, on the CPU of the thread that calls, or on one of
 * their own, to which each call is a message (offloaded).
 *
 * As mimalloc, it has pages of 64 KiB with blocks of one size, writes down the blocks of 4 KiB at a time as
 * they are first needed, and takes of a page the block that was freed last. No memory goes back to the
 * system. A message to malloc is a word in a line of the thread's own, and the answer another word of it;
 * those to free are words in a ring that the allocator reads, and clears, before it answers the next malloc,
 * or when the ring is full. */
#ifndef CALM_TRACE_LAYOUT_H
#define CALM_TRACE_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>

#include "machine.h"

enum { LAYOUT_SERVER = MACHINE_CPUS - 1, LAYOUT_RING_WORDS = 64 };

struct layout_kind {
    bool segregated;
    bool offloaded;
};

struct layout;

/* NULL, where memory is short. The machine must outlive it. */
struct layout *layout_new(struct layout_kind kind, struct machine *machine);
void layout_delete(struct layout *layout);

/* By a thread on a CPU below LAYOUT_SERVER. Memory that is short ends the process. */
uint64_t layout_malloc(struct layout *layout, unsigned cpu, uint64_t bytes);

/* A block of layout_malloc's. */
void layout_free(struct layout *layout, unsigned cpu, uint64_t block);

/* Misses of the threads' own caches, and upgrades, in what carries their messages. */
uint64_t layout_message_misses(const struct layout *layout);

#endif
