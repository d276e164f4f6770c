/*
 * Which physical frames hold a range of memory: /proc/self/pagemap, which shows them to CAP_SYS_ADMIN alone.
 *
 * Of a virtual machine they are what its hypervisor pretends. Thread-safe; preserves errno; allocates
 * nothing.
 */
#ifndef CALM_OS_PAGEMAP_H
#define CALM_OS_PAGEMAP_H

#include <stddef.h>
#include <stdint.h>

#define PAGEMAP_ABSENT UINT64_MAX /* in no frame: never touched, or swapped out */

/*
 * The frame numbers of the pages from a page-aligned start. root stands for "/". Returns 0; EPERM if the
 * kernel hides frames from this process, else what opening or reading the file failed with.
 */
int pagemap_frames(const char *root, const void *start, size_t pages, uint64_t *frames);

#endif
