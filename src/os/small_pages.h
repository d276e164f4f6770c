/*
 * Single pages: had from the kernel one by one, never as a huge page, and moved to other addresses without
 * being copied, so that each stays in its physical frame.
 *
 * Preserves errno; allocates nothing. A mover has one owner; the rest is thread-safe.
 */
#ifndef CALM_OS_SMALL_PAGES_H
#define CALM_OS_SMALL_PAGES_H

#include <stdbool.h>
#include <stddef.h>

/* Makes reserved address space writable, in small pages only. False if memory is short. */
bool small_pages_commit(void *base, size_t bytes);

/* Makes all of it resident now. False if memory is short. */
bool small_pages_populate(void *base, size_t bytes);

/* Bytes of memory that can be had without swapping, as the kernel estimates; root stands for "/". SIZE_MAX
 * where it does not say. */
size_t small_pages_available(const char *root);

struct page_mover {
    int descriptor;  /* userfaultfd, or -1 */
    size_t mappings; /* that moves by other means may still add to the process */
};

/*
 * Opens a mover of pages into the committed, still untouched range. By UFFDIO_MOVE (Linux 6.8) the range
 * stays one mapping; where there is none, or it fails, a page moves by mremap (Linux 5.7) and is a mapping of
 * its own, for which there is a bound.
 */
void page_mover_open(struct page_mover *mover, void *base, size_t bytes);

/* Moves a resident page of private anonymous memory, which becomes untouched, to an untouched page of the
 * range. False, and nothing is changed, if the kernel cannot. */
bool page_mover_move(struct page_mover *mover, void *from, void *to);

/* While it is open, a system call that touches an untouched page of the range fails. */
void page_mover_close(struct page_mover *mover);

#endif
