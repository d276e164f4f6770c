/*
 * How near the process is to the memory limit of its control group (cgroup v2), whether it already waits for
 * memory, and how much of the CPUs it may have. Reads files of /proc and /sys: for rare looks. Thread-safe;
 * preserves errno; allocates nothing.
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

/*
 * How many CPUs' time the process may use: the least that its group and those above it are allowed, by
 * cpu.max or, of cgroup v1, by cpu.cfs_quota_us. Infinity where there is no limit, and where nothing is
 * known. It is an average over the scheduler's period (0.1 s by default), not a number of CPUs that run at a
 * time: who has used it up waits on all of them. Takes up to 8 KiB of stack.
 */
double cgroup_cpu_quota(void);

/* The same where another folder than "" stands before /proc and /sys. For tests. */
double cgroup_cpu_quota_in(const char *root);

#endif
