/*
 * The limits on memory and CPU time that control groups (versions 1 and 2) set
 * for the process. The arena calls this file at most once per epoch
 * (memory.h).
 *
 * The functions read files of /proc and /sys. They are thread-safe, preserve
 * errno, allocate nothing, and take up to 4 KiB of stack. `root` stands for
 * "/".
 */
#ifndef CALM_OS_CGROUP_H
#define CALM_OS_CGROUP_H

#include <stdbool.h>
#include <stdint.h>

/*
 * Returns the number of bytes by which the process may grow before its group,
 * or a group above it, uses nine tenths of its limit. The limit of a group is
 * memory.max or memory.high, in version 1 memory.limit_in_bytes. The page cache
 * does not count as used, since the kernel reclaims it before any task has to
 * wait. Returns 0 while the process's group is under pressure.
 *
 * *limit receives the lowest of these limits. Both numbers are UINT64_MAX if
 * there is no limit, or none is known.
 */
uint64_t cgroup_available_bytes(const char *root, uint64_t *limit);

/* Returns whether a file such as memory.pressure says that some task waited for
 * memory for a tenth of the last ten seconds. */
bool cgroup_is_under_pressure(const char *path);

/*
 * Returns the number of CPUs whose time the process may use: the lowest quota
 * (cpu.max, in version 1 cpu.cfs_quota_us) of its group and the groups above
 * it. Returns infinity if there is no limit, or none is known.
 *
 * The number is an average over the scheduler's period (0.1 s by default). It
 * does not limit how many CPUs run the process at a time: a group that has used
 * up its quota waits on all of them.
 */
double cgroup_cpu_quota(const char *root);

#endif
