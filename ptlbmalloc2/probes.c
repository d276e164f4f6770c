#include "probes.h"

PROBE_DEFINE_1("ptlbmalloc2", "trim__begin", probe_trim_begin)
PROBE_DEFINE_2("ptlbmalloc2", "trim__end", probe_trim_end)
