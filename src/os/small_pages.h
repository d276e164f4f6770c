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
    size_t mappings; /* that its moves have added to the process */
};

/*
 * Opens a mover of pages into the committed, still untouched range. By UFFDIO_MOVE (Linux 6.8) the range
 * stays one mapping; where there is none, or it fails, a page moves by mremap (Linux 5.7) and is a mapping of
 * its own. Of these the process has PAGE_MAPPINGS_MOST: what a mover has used is, when its range is no
 * more, to be returned.
 */
void page_mover_open(struct page_mover *mover, void *base, size_t bytes);

/* Moves a resident page of private anonymous memory, which becomes untouched, to an untouched page of the
 * range. Returns 0; else nothing is changed: ENOMEM if there may be no more mappings, ENOTSUP if the kernel
 * cannot. */
int page_mover_move(struct page_mover *mover, void *from, void *to);

/* While it is open, a system call that touches an untouched page of the range fails. */
void page_mover_close(struct page_mover *mover);

/* A quarter of what the kernel lets a process have: the rest is the program's. */
#define PAGE_MAPPINGS_MOST ((size_t)16384)

void page_mappings_return(size_t mappings);

/* In the child of fork, where movers of other threads are no more: so many are in use. */
void page_mappings_after_fork(size_t in_use);

#endif
