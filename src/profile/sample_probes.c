#include "profile/sample_probes.h"

PROBE_DEFINE_3("otel_memory", "alloc", probe_alloc)
PROBE_DEFINE_1("otel_memory", "free", probe_free)
