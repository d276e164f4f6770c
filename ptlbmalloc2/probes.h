/* ptlbmalloc2's probes for tracers, of provider `ptlbmalloc2` (docs/usdt.md). */
#ifndef PTLBMALLOC2_PROBES_H
#define PTLBMALLOC2_PROBES_H

#include "os/probe.h"

/* trim__begin: a trim is to leave so many bytes at the top of each arena; trim__end: it gave back so many
 * bytes of address space, of which so many were resident. */
PROBE_DECLARE(probe_trim_begin, uint64_t keep_bytes);
PROBE_DECLARE(probe_trim_end, uint64_t bytes_trimmed, uint64_t bytes_purged);

#endif
