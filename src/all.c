/*
 * The whole allocator as one file, for a program that compiles it in: what libcalmalloc.a has, in the order
 * of the layers. Compile it with -fno-builtin -fexceptions -fvisibility=hidden, and with -DCALM_PROFILE for
 * the optional feature.
 *
 * The builds of this project compile each file alone. That all may be in one means that no two have the same
 * name for a function, a type or a constant, so that profiles and debuggers name each without doubt.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#ifdef CALM_PROFILE
#define CALM_HAS_PROFILE "profile "
#else
#define CALM_HAS_PROFILE
#endif
#ifndef CALM_FEATURES
#define CALM_FEATURES "" CALM_HAS_PROFILE
#endif

/* clang-format off */
#include "namespace.h"
#include "base/size_class.c"
#include "policy/demand.c"
#include "os/address_range.c"
#include "os/assert.c"
#include "os/cgroup.c"
#include "os/clock.c"
#include "os/control.c"
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
#include "os/rseq_check.c"
#include "os/signals.c"
#include "os/stdio.c"
#include "os/symbols.c"
#include "os/text.c"
#include "os/thread.c"
#include "os/vm.c"
#include "placement/colors.c"
#include "placement/lines.c"
#include "heap/heap.c"
#include "heap/large_blocks.c"
#include "heap/marks.c"
#include "heap/purge_batch.c"
#include "heap/runs.c"
#include "heap/slab.c"
#include "heap/slab_blocks.c"
#include "heap/space.c"
#include "heap/span.c"
#include "heap/span_table.c"
#include "heap/walk.c"
#include "cache/cpu_cache.c"
#include "cache/depot.c"
#include "cache/locked.c"
#include "cache/rseq.c"
#include "arena/blocks.c"
#include "arena/check.c"
#include "arena/epoch.c"
#include "arena/family.c"
#include "arena/fault_cost.c"
#include "arena/flush.c"
#include "arena/arena.c"
#include "arena/helper.c"
#include "arena/large.c"
#include "arena/arena_probes.c"
#include "arena/purger.c"
#include "arena/select.c"
#include "arena/terms.c"
#include "arena/thp_policy.c"
#include "arena/verify.c"
#ifdef CALM_PROFILE
#include "profile/cfi.c"
#include "profile/heap_profile.c"
#include "profile/mappings.c"
#include "profile/pprof.c"
#include "profile/sample_probes.c"
#include "profile/samples.c"
#include "profile/sampling.c"
#include "profile/unwind.c"
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
#include "api/range_calls.c"
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
#include "api/instance.c"
#include "api/syscall_wrappers.c"
