/*
 * The family: a process and those that it forked, as far as they keep free memory. Each notes how much it
 * keeps on a page that they share, once in an epoch; a note that is old counts no more, since its process
 * keeps nothing, or has ended. So several workers do not keep several times what one may: memory costs more
 * for each.
 *
 * Without locks; a process writes one word, and reads all. No page is mapped before the first fork.
 */
#ifndef CALM_GOVERNOR_FAMILY_H
#define CALM_GOVERNOR_FAMILY_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct family {
    struct family_page *page; /* NULL: there was no fork, or no memory for it */
    uint64_t member; /* 0: this process has noted nothing yet, so that a fork does not touch the page */
};

/* Before a fork, in the parent, and after it, in the child. */
void family_before_fork(struct family *family);
void family_start_child(struct family *family);

/* Notes how much this process keeps. Returns the factor for the price of memory: 1 where no other one
 * keeps any, 1/n where n keep equally much. One thread at a time. */
double family_share(struct family *family, size_t kept_bytes);

#endif
