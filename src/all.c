/*
 * The whole allocator as one file, for a program that compiles it in: what libcalmalloc.a has, in the order
 * of the layers. Compile it with -fno-builtin -fexceptions -fvisibility=hidden, and with -DCALM_OFFLOAD,
 * -DCALM_PROFILE and -DCALM_COLORED for the optional features.
 *
 * The builds of this project compile each file alone. That all may be in one means that no two have the same
 * name for a function, a type or a constant, so that profiles and debuggers name each without doubt.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#ifdef CALM_OFFLOAD
#define CALM_HAS_OFFLOAD "offload "
#else
#define CALM_HAS_OFFLOAD
#endif
#ifdef CALM_PROFILE
#define CALM_HAS_PROFILE "profile "
#else
#define CALM_HAS_PROFILE
#endif
#ifdef CALM_COLORED
#define CALM_HAS_COLORED "colored "
#else
#define CALM_HAS_COLORED
#endif
#ifndef CALM_FEATURES
#define CALM_FEATURES "" CALM_HAS_OFFLOAD CALM_HAS_PROFILE CALM_HAS_COLORED
#endif

/* clang-format off */
#include "namespace.h"
#include "policy/demand.c"
#include "os/address_range.c"
#include "os/assert.c"
#include "os/cgroup.c"
#include "os/clock.c"
#include "os/control.c"
#include "os/cpu_times.c"
#include "os/cpus.c"
#include "os/file.c"
#include "os/filters.c"
#include "os/futex.c"
#include "os/hardware_caches.c"
#include "os/lock.c"
#include "os/memory.c"
#include "os/process.c"
#include "os/purge.c"
#include "os/random.c"
#include "os/residency.c"
#include "os/rseq.c"
#include "os/stdio.c"
#include "os/symbols.c"
#include "os/text.c"
#include "os/thread.c"
#include "os/topology.c"
#include "os/vm.c"
#include "placement/colors.c"
#include "placement/lines.c"
#include "heap/heap.c"
#include "heap/large_blocks.c"
#include "heap/marks.c"
#include "heap/purge_batch.c"
#include "heap/runs.c"
#include "heap/size_class.c"
#include "heap/slab.c"
#include "heap/slab_blocks.c"
#include "heap/space.c"
#include "heap/span.c"
#include "heap/span_table.c"
#include "heap/walk.c"
#include "cache/cpu_cache.c"
#include "cache/depot.c"
#include "governor/blocks.c"
#include "governor/check.c"
#include "governor/epoch.c"
#include "governor/family.c"
#include "governor/fault_cost.c"
#include "governor/flush.c"
#include "governor/governor.c"
#include "governor/helper.c"
#include "governor/large.c"
#include "governor/probes.c"
#include "governor/purger.c"
#include "governor/terms.c"
#include "governor/thp_policy.c"
#include "governor/verify.c"
#include "backend/backend_direct.c"
#ifdef CALM_OFFLOAD
#include "offload/affinity.c"
#include "offload/backend_offload.c"
#include "offload/call.c"
#include "offload/client.c"
#include "offload/client_cache.c"
#include "offload/contention.c"
#include "offload/endpoint.c"
#include "offload/heap_mode.c"
#include "offload/lifecycle.c"
#include "offload/loop.c"
#include "offload/overflow.c"
#include "offload/prefill.c"
#include "offload/prefill_queue.c"
#include "offload/ring.c"
#include "offload/serve.c"
#include "offload/server.c"
#include "offload/sync.c"
#endif
#ifdef CALM_PROFILE
#include "profile/cfi.c"
#include "profile/heap_profile.c"
#include "profile/mappings.c"
#include "profile/pprof.c"
#include "profile/probes.c"
#include "profile/samples.c"
#include "profile/sampling.c"
#include "profile/unwind.c"
#endif
#ifdef CALM_COLORED
#include "colored/balance.c"
#include "colored/block_table.c"
#include "colored/colored.c"
#include "colored/conflicts.c"
#include "colored/eviction.c"
#include "colored/page_mover.c"
#include "colored/pagemap.c"
#include "colored/surplus.c"
#endif
#include "api/allocator.c"
#include "api/calm.c"
#include "api/counter_terms.c"
#include "api/counters.c"
#include "api/debug.c"
#include "api/features.c"
#include "api/init.c"
#include "api/limits.c"
#include "api/mallinfo.c"
#include "api/malloc.c"
#include "api/marks.c"
#include "api/misuse.c"
#include "api/new.c"
#include "api/options.c"
#include "api/own_threads.c"
#include "api/pin.c"
#include "api/placing.c"
#include "api/registration.c"
#include "api/report.c"
#include "api/requests.c"
#include "api/settings.c"
#include "api/state.c"
#include "api/syscall_wrappers.c"
#ifdef CALM_OFFLOAD
#include "api/offload_start.c"
#endif
#ifdef CALM_COLORED
#include "api/calm_colored.c"
#endif
