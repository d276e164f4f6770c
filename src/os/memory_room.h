/*
 * How much memory the process may still take before others, or itself, have to wait for it. Reads files of
 * /proc and /sys: for rare looks. Thread-safe; preserves errno; allocates nothing; 4 KiB of stack.
 */
#ifndef CALM_OS_MEMORY_ROOM_H
#define CALM_OS_MEMORY_ROOM_H

#include <stddef.h>

/* In bytes: until nine tenths of a control group's limit are used (cgroup.h), or 95 % of the machine's memory
 * but for what is set aside for huge pages. 0 while tasks of the group wait for memory, or of the machine, of
 * which less than a fifth is available. SIZE_MAX where nothing is known. */
size_t memory_room_bytes(void);

/* The same where another folder than "" stands before /proc and /sys. For tests. */
size_t memory_room_bytes_in(const char *root);

#endif
