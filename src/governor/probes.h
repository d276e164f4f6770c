/*
 * The governor's probes for tracers, of provider `calmalloc` (docs/usdt.md). They fire with locks held, and a
 * tracer's program then runs in the kernel only.
 */
#ifndef CALM_GOVERNOR_PROBES_H
#define CALM_GOVERNOR_PROBES_H

#include "os/probe.h"

/* purge__begin: a purge sets out to give back so many bytes; purge__end: it gave back so many, in so many
 * ranges, and took so many ns of CPU time. The reason is an enum reason. */
PROBE_DECLARE(probe_purge_begin, uint64_t reason, uint64_t bytes);
PROBE_DECLARE(probe_purge_end, uint64_t reason, uint64_t bytes, uint64_t ranges, uint64_t ns);

/* limit: the bound on free memory in the heap is another one, in bytes. */
PROBE_DECLARE(probe_limit, uint64_t bytes);

/* helper__wakeup: the helper looks for something to tidy. */
PROBE_DECLARE(probe_helper_wakeup, void);

#endif
