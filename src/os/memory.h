/*
 * How much memory the machine has, and how much the process may still take before any task must wait for
 * memory. Called by the governor once per epoch at most.
 *
 * Reads files of /proc and /sys. Thread-safe; preserves errno; allocates nothing; takes up to 4 KiB of stack.
 */
#ifndef CALM_OS_MEMORY_H
#define CALM_OS_MEMORY_H

#include <stddef.h>

/* The machine's memory. One system call; reads no file. */
size_t memory_total_bytes(void);

/*
 * Bytes until nine tenths of a control group's limit are used (cgroup.h), or 95 % of the machine's memory
 * (huge pages set aside by hugetlbfs not counted). 0 while tasks of the group wait for memory, or tasks of
 * the machine while less than a fifth of its memory is available. SIZE_MAX if nothing is known. Stores the
 * limit of which these are a part: the group's, or the machine's memory. root stands for "/".
 */
size_t memory_available_bytes(const char *root, size_t *limit);

#endif
