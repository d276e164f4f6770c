/*
 * The physical frames of a range of memory, from /proc/self/pagemap. The kernel shows them to CAP_SYS_ADMIN
 * only; in a virtual machine, they are the guest's. Thread-safe; preserves errno; allocates nothing.
 */
#ifndef CALM_COLORED_PAGEMAP_H
#define CALM_COLORED_PAGEMAP_H

#include <stddef.h>
#include <stdint.h>

#define PAGEMAP_ABSENT UINT64_MAX /* in no frame: never touched, or swapped out */

/*
 * The frame numbers of the pages from a page-aligned start. root stands for "/". Returns 0; EPERM if the
 * kernel hides frames from this process; else the errno value of opening or reading the file.
 */
int pagemap_frames(const char *root, const void *start, size_t pages, uint64_t *frames);

#endif
