/*
 * Moving single resident pages to other addresses without copying them, so that each stays in its frame.
 *
 * By UFFDIO_MOVE of userfaultfd (Linux 6.8), the target range stays one mapping. Where that fails, a page
 * moves by mremap (Linux 5.7), and becomes a mapping of its own. The kernel limits the mappings of a process,
 * so all movers together use at most MAX_PAGE_MAPPINGS.
 *
 * Preserves errno; allocates nothing. A mover has one owner; the mappings are counted for all threads.
 */
#ifndef CALM_COLORED_PAGE_MOVER_H
#define CALM_COLORED_PAGE_MOVER_H

#include <stddef.h>

/* A quarter of the kernel's limit: the rest is the program's. */
#define MAX_PAGE_MAPPINGS ((size_t)16384)

struct page_mover {
    int descriptor;  /* userfaultfd, or -1 */
    size_t mappings; /* pages that became mappings of their own */
};

/* Opens a mover into a committed, untouched range. */
void page_mover_open(struct page_mover *mover, void *base, size_t bytes);

/*
 * Moves a page of private anonymous memory, which becomes untouched, to an untouched page of the range.
 * Returns 0; or, with nothing changed, ENOMEM if no more mappings may be added, ENOTSUP if the kernel cannot
 * move pages.
 */
int page_mover_move(struct page_mover *mover, void *from, void *to);

/* Until it is closed, a system call that touches an untouched page of the range fails. */
void page_mover_close(struct page_mover *mover);

/* For the mappings of a closed mover, once its range is unmapped. */
void page_mappings_return(size_t mappings);

/* In the child of a fork, which lacks the movers of other threads: this many mappings are in use. */
void page_mappings_after_fork(size_t in_use);

#endif
