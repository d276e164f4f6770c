/*
 * What control groups, of version 1 and 2, allow the process: memory, and CPU time. Called by the governor
 * once per epoch at most (memory.h), and before the server of offload mode starts.
 *
 * Reads files of /proc and /sys. Thread-safe; preserves errno; allocates nothing, and takes up to 4 KiB of
 * stack. root stands for "/".
 */
#ifndef CALM_OS_CGROUP_H
#define CALM_OS_CGROUP_H

#include <stdbool.h>
#include <stdint.h>

/*
 * The number of bytes by which the process may grow before its group, or one above it, uses nine tenths of
 * its limit: memory.max and memory.high, or memory.limit_in_bytes. The page cache does not count, since the
 * kernel reclaims it before any task has to wait. 0 also while the group is under pressure. Stores the lowest
 * of these limits. Both are UINT64_MAX if there is no limit, or none is known.
 */
uint64_t cgroup_available_bytes(const char *root, uint64_t *limit);

/* Whether a file such as memory.pressure says that some task waited for a tenth of the last ten seconds. */
bool cgroup_is_under_pressure(const char *path);

/*
 * The number of CPUs whose time the process may use: the lowest quota of its group and those above it, by
 * cpu.max or, of version 1, by cpu.cfs_quota_us. Infinity if there is no limit, or none is known. It is an
 * average over the scheduler's period (0.1 s by default), not a number of CPUs that run at a time: a group
 * that has used up its quota waits on all of them.
 */
double cgroup_cpu_quota(const char *root);

#endif
