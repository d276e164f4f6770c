/*
 * How much memory the process may still take before it, or others, must wait for memory. Reads files of /proc
 * and /sys: for rare calls. Thread-safe; preserves errno; allocates nothing; uses up to 4 KiB of stack.
 */
#ifndef CALM_OS_MEMORY_ROOM_H
#define CALM_OS_MEMORY_ROOM_H

#include <stddef.h>

/*
 * Bytes until nine tenths of a control group's limit are used (cgroup.h), or 95 % of the machine's memory
 * (huge pages set aside by hugetlbfs not counted). 0 while tasks of the group wait for memory, or tasks of
 * the machine while less than a fifth of its memory is available. SIZE_MAX if nothing is known.
 */
size_t memory_room_bytes(void);

/* The same where another folder than "" stands before /proc and /sys. For tests. */
size_t memory_room_bytes_in(const char *root);

#endif
