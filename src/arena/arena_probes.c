#include "arena/arena_probes.h"

PROBE_DEFINE_2("calmalloc", "purge__begin", probe_purge_begin)
PROBE_DEFINE_4("calmalloc", "purge__end", probe_purge_end)
PROBE_DEFINE_1("calmalloc", "limit", probe_limit)
PROBE_DEFINE_0("calmalloc", "helper__wakeup", probe_helper_wakeup)
