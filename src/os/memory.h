/*
 * How much memory the machine has, and how much the process may still take
 * before any task must wait for memory. The arena calls this file at most
 * once per epoch.
 *
 * The functions read files of /proc and /sys. They are thread-safe, preserve
 * errno, allocate nothing, and take up to 4 KiB of stack.
 */
#ifndef CALM_OS_MEMORY_H
#define CALM_OS_MEMORY_H

#include <stddef.h>

/* Returns the size of the machine's memory, by one system call. Reads no
 * file. */
size_t memory_total_bytes(void);

/*
 * Returns the number of bytes that the process may take until nine tenths of a
 * control group's limit (cgroup.h) or 95 % of the machine's memory are in use,
 * whichever comes first. Huge pages that hugetlbfs has set aside are not part
 * of the machine's memory. Returns 0 while tasks of the group wait for memory,
 * and while tasks of the machine wait for memory and less than a fifth of it is
 * available. Returns SIZE_MAX if nothing is known.
 *
 * *limit receives the limit to which the result refers: the group's limit, or
 * the machine's memory. `root` stands for "/".
 */
size_t memory_available_bytes(const char *root, size_t *limit);

#endif
