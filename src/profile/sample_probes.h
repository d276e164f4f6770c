/* The heap profile's static probes, of provider `otel_memory`. They are the
 * contract between allocators and the OpenTelemetry eBPF profiler (its design
 * document 00003, "Memory Profiling"). heap_profile.c fires them. */
#ifndef CALM_PROFILE_SAMPLE_PROBES_H
#define CALM_PROFILE_SAMPLE_PROBES_H

#include "os/probe.h"

/* Bytes between two samples on average while a tracer listens and nothing else
 * sets the mean. */
#define PROBES_MEAN_BYTES ((uint64_t)512 << 10)

/* alloc fires for a sampled block of `size` bytes, which stands for `weight`
 * bytes. */
PROBE_DECLARE(probe_alloc, uint64_t block, uint64_t size, uint64_t weight);

/* free fires before a sampled block is freed. */
PROBE_DECLARE(probe_free, uint64_t block);

#endif
