/*
 * An address range: reserved address space whose front is committed and grows
 * on demand. The heap's metadata, its segments of blocks, and the heap
 * profile's tables are such ranges.
 *
 * A range has one owner at a time. Sizes are in bytes. The functions preserve
 * errno and allocate nothing.
 */
#ifndef CALM_OS_ADDRESS_RANGE_H
#define CALM_OS_ADDRESS_RANGE_H

#include <stdbool.h>
#include <stddef.h>

struct address_range {
    char *base;
    size_t reserved;  /* whole pages */
    size_t committed; /* whole pages, from the base on */
};

/* Reserves bytes, rounded up to pages. If there is no room, returns false and
 * leaves the range empty. */
bool address_range_reserve(struct address_range *range, size_t bytes);

/* Reserves several ranges side by side. If there is no room for all of them,
 * returns false and leaves all of them empty. */
bool address_ranges_reserve(struct address_range *ranges, const size_t *bytes, size_t count);

/* Releases a range, which is empty afterwards. An empty range may be released,
 * too. */
void address_range_release(struct address_range *range);

/* Commits at least the first bytes of the range, in large steps. Returns false
 * if memory is short or the range is too small. */
bool address_range_reach(struct address_range *range, size_t bytes);

/* Releases the end of the range that is neither committed nor within the first
 * `bytes`. */
void address_range_trim(struct address_range *range, size_t bytes);

#endif
