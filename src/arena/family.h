/*
 * The family: a process and the processes that it forked. Its members share a
 * page, on which each notes once per epoch how much free memory it keeps. The
 * price of memory rises for each member with what the others keep, so that
 * several workers together do not keep several times what one process may.
 *
 * The family uses no locks. A member writes its own word, and reads all words.
 * An old note does not count, because its process keeps nothing, or has ended.
 * No page is mapped before the first fork.
 */
#ifndef CALM_ARENA_FAMILY_H
#define CALM_ARENA_FAMILY_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

struct family {
    struct family_page *page; /* NULL if there was no fork, or no memory for the page */
    uint64_t member;          /* 0 until this process notes something; so a fork does not touch the page */
};

/* The parent calls family_before_fork before a fork. The child calls
 * family_start_child after it. */
void family_before_fork(struct family *family);
void family_start_child(struct family *family);

/* Notes how much free memory this process keeps. Returns the factor for the
 * price of memory: 1 if no other process keeps free memory, and 1/n if each of
 * n processes keeps an equal amount. One thread calls it at a time. */
double family_share(struct family *family, size_t kept_bytes);

#endif
