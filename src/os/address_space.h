/*
 * Address space: reserved first, made usable from the front as it is needed.
 *
 * What is reserved has no access rights, so that neither strict overcommit charges it nor mlockall populates
 * it; and what is usable is one mapping, however much it holds, since it grows at its end only (65,530
 * mappings are all that a process may have). Core files have what is usable only.
 *
 * Thread-safe unless said otherwise; preserves errno; allocates nothing.
 */
#ifndef CALM_OS_ADDRESS_SPACE_H
#define CALM_OS_ADDRESS_SPACE_H

#include <stdbool.h>
#include <stddef.h>

/* Of the kernel that runs, not of the one we were built for. Asked once. */
size_t os_page_size(void);

/* Reserves bytes, a multiple of the page size, aligned to alignment, a power of two, between two pages that
 * are never usable. NULL if there is no room. */
void *os_reserve(size_t bytes, size_t alignment);

/* All of what os_reserve returned. */
void os_release(void *base, size_t bytes);

/* The machine's memory. */
size_t os_memory_bytes(void);

/* Whether the kernel would map so much at once, as its policy of overcommitment is. */
bool os_would_map(size_t bytes);

/* The limit on address space (RLIMIT_AS), SIZE_MAX if there is none. */
size_t os_address_space_limit(void);

/* Makes reserved pages readable and writable. False if memory is short. */
bool os_commit(void *base, size_t bytes);

/* Makes the pages that hold the first bytes of what is reserved readable, as zeros, at no cost in memory. */
void os_make_readable(void *base, size_t bytes);

/* Makes committed pages resident and writable at once, as far as there is memory. False if the kernel cannot
 * (before Linux 5.14), or must not. */
bool os_populate(void *base, size_t bytes);

/* Asks for huge pages wherever they fit in the range. False if the kernel has none. Where the pages of a part
 * of one are given back, the kernel brings them in again, all together, when it finds the time (khugepaged).
 */
bool os_want_huge_pages(void *base, size_t bytes);

/* The kernel makes no more huge pages of what lies in the range; those that it has made stay. */
void os_want_no_huge_pages(void *base, size_t bytes);

/* Moves the pages of one range to another of the same size, whose content is lost; the first then is zero.
 * Both must be committed. False, and nothing changed, if the kernel cannot. */
bool os_move_pages(void *from, void *to, size_t bytes);

/* Replaces a range, moved pages included, by a new mapping of zeros that can merge with its neighbours. */
bool os_renew(void *base, size_t bytes);

/* Reserved memory of which a front part is usable. One owner at a time. */
struct os_region {
    char *base;
    size_t reserved;
    size_t committed;
};

/* Makes at least the first bytes usable; grows in large steps. False if it cannot. */
static inline bool os_region_reach(struct os_region *region, size_t bytes);
bool os_region_grow(struct os_region *region, size_t bytes);

/* Lets go what is reserved beyond the first bytes, rounded up to a page, and beyond what is usable. */
void os_region_trim(struct os_region *region, size_t bytes);

static inline bool os_region_reach(struct os_region *region, size_t bytes) {
    return bytes <= region->committed || os_region_grow(region, bytes);
}

#endif
