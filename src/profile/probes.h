/*
 * The probes of the heap profile, of provider `otel_memory`: the contract between allocators and the
 * OpenTelemetry eBPF profiler (its design document 00003, "Memory Profiling"). Fired by heap_profile.c.
 */
#ifndef CALM_PROFILE_PROBES_H
#define CALM_PROFILE_PROBES_H

#include "os/probe.h"

/* Bytes between two samples on average while a tracer listens and nothing else sets the mean. */
#define PROBES_MEAN_BYTES ((uint64_t)512 << 10)

/* alloc: a sampled block of so many bytes, which stands for weight bytes. */
PROBE_DECLARE(probe_alloc, uint64_t block, uint64_t size, uint64_t weight);

/* free: a sampled block is about to be freed. */
PROBE_DECLARE(probe_free, uint64_t block);

#endif
