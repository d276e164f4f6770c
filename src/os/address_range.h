/*
 * A range of reserved address space whose front is committed and grows as it is needed: the metadata of
 * heaps, the segments of blocks, the tables of profiles.
 *
 * One owner at a time. Sizes are in bytes. Preserves errno; allocates nothing.
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

/* Reserves bytes, rounded up to pages. False, and an empty range, if there is no room. */
bool address_range_reserve(struct address_range *range, size_t bytes);

/* The same for several, side by side. False, and all of them empty, if there is no room for all. */
bool address_ranges_reserve(struct address_range *ranges, const size_t *bytes, size_t count);

/* The range is empty then. It may have been before. */
void address_range_release(struct address_range *range);

/* Commits at least the first bytes, in large steps. False if it cannot. */
bool address_range_reach(struct address_range *range, size_t bytes);

/* Releases what is reserved beyond the first bytes and beyond what is committed. */
void address_range_trim(struct address_range *range, size_t bytes);

#endif
