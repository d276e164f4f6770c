/*
 * How near the process is to the memory limit of its control group (cgroup v2), and whether it already waits
 * for memory. Reads files of /proc and /sys: for rare looks. Preserves errno; allocates nothing.
 */
#ifndef CALM_OS_CGROUP_H
#define CALM_OS_CGROUP_H

#include <stdbool.h>

/* True if the group, or one above it, uses more than nine tenths of its memory.max or memory.high, or if some
 * task of the group waited for memory a tenth of the last ten seconds (memory.pressure). False where nothing
 * is known. */
bool cgroup_memory_is_short(void);

/* The same of a group by its folder, without those above. For tests. */
bool cgroup_folder_is_short(const char *folder);

#endif
