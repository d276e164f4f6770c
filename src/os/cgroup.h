/*
 * What control groups, of version 1 and 2, allow the process: memory, and CPU time. Reads files of /proc and
 * /sys: for rare looks. Thread-safe; preserves errno; allocates nothing, and takes up to 4 KiB of stack.
 */
#ifndef CALM_OS_CGROUP_H
#define CALM_OS_CGROUP_H

#include <stdbool.h>
#include <stdint.h>

/*
 * How many bytes the process may grow by before its group, or one above it, uses nine tenths of its limit:
 * memory.max and memory.high, or memory.limit_in_bytes. What caches files does not count, as the kernel gives
 * it up before anybody has to wait. 0 also where some task of the group waited for memory for a tenth of the
 * last ten seconds (memory.pressure). UINT64_MAX where there is no limit, and where nothing is known.
 */
uint64_t cgroup_memory_room(void);

/* The same where another folder than "" stands before /proc and /sys. For tests. */
uint64_t cgroup_memory_room_in(const char *root);

/* Whether a file such as memory.pressure says that some task waited for a tenth of the last ten seconds. */
bool cgroup_is_pressed(const char *path);

/*
 * How many CPUs' time the process may use: the least that its group and those above it are allowed, by
 * cpu.max or, of version 1, by cpu.cfs_quota_us. Infinity where there is no limit, and where nothing is
 * known. It is an average over the scheduler's period (0.1 s by default), not a number of CPUs that run at a
 * time: who has used it up waits on all of them.
 */
double cgroup_cpu_quota(void);
double cgroup_cpu_quota_in(const char *root);

#endif
