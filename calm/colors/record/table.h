/*
 * The large blocks of this process that live, kept in a file that calm reads meanwhile (layout.h).
 *
 * Thread-safe; preserves errno; never calls malloc. After fork the child goes on in a file of its own. Where
 * there is no file, because nobody asked for one or it cannot be made, nothing is kept.
 */
#ifndef CALM_COLORS_TABLE_H
#define CALM_COLORS_TABLE_H

#include "layout.h"

#include <stdbool.h>
#include <stddef.h>

struct stack {
    unsigned depth;
    uint64_t frames[FRAMES];
};

/* Begins to keep blocks of at least so many bytes in the folder. Once, early. calm is told where we are. */
void table_open(const char *folder, size_t least, uintptr_t own_start, uintptr_t own_end);

/* Whether a block of so many bytes is to be added. */
bool table_wants(size_t bytes);

void table_add(enum kind kind, const void *address, size_t bytes, const struct stack *stack);

/* Cheap, and true for all that were added: whether there may be something at the address. */
bool table_may_have(const void *address);

/*
 * Before a block goes. False if it was not there; else its record is copied, for table_restore. Where memory
 * was never more, calm gets to see it first: that takes a while.
 */
bool table_remove(const void *address, struct record *gone);

/* It has stayed after all. */
void table_restore(const struct record *gone);

/*
 * Memory that is unmapped, or mapped anew: mappings end, or become shorter. Before the call that does it,
 * calm gets to see them, where memory was never more. They are cut after it, if it has not failed: only those
 * that were added before it (0: there were none), as another thread may have been given the same addresses
 * since.
 */
uint64_t table_before_cut(const void *address, size_t bytes);
void table_cut(const void *address, size_t bytes, uint64_t before);

/* Waits until calm has had a look, if it does: for at most two seconds until it looks, and a minute more. */
void table_show(enum moment moment);

/* Around fork. */
void table_before_fork(void);
void table_after_fork(bool is_child);

#endif
