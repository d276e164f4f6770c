/* The arena's static probes for tracers, of provider `calmalloc`
 * (docs/usdt.md). They fire while the thread holds locks. The tracer's program
 * runs in the kernel, and so cannot wait for these locks. */
#ifndef CALM_ARENA_ARENA_PROBES_H
#define CALM_ARENA_ARENA_PROBES_H

#include "os/probe.h"

/* purge__begin fires before a purge, with the number of bytes that the purge is
 * to return. purge__end fires after it, with the bytes and ranges that it
 * returned and the nanoseconds of CPU time that it took. The reason is an enum
 * reason. */
PROBE_DECLARE(probe_purge_begin, uint64_t reason, uint64_t bytes);
PROBE_DECLARE(probe_purge_end, uint64_t reason, uint64_t bytes, uint64_t ranges, uint64_t ns);

/* limit fires when the limit on free memory in the heap has changed. */
PROBE_DECLARE(probe_limit, uint64_t bytes);

/* helper__wakeup fires when the helper wakes up to check for work. */
PROBE_DECLARE(probe_helper_wakeup, void);

#endif
