/*
 * The heap profile: which allocations are sampled, and when. The other files of this folder are its parts,
 * and the allocator's entry points call only this one, through api/features.h, since the feature is optional.
 *
 * While the profile is off it costs malloc and free nothing. Switching it on disables malloc's fast path
 * (use_fast_path). Each malloc then takes the slow path, where it counts its bytes down to the next sample,
 * with one counter for each CPU. A sampled block is a run of pages, whatever its size, so that only the free
 * of a run needs to ask whether the block was sampled.
 *
 * Thread-safe; preserves errno; allocates nothing. One lock serializes switching; the table of samples has
 * its own, which is acquired after it. No other lock is acquired under either.
 */
#ifndef CALM_PROFILE_HEAP_PROFILE_H
#define CALM_PROFILE_HEAP_PROFILE_H

#include "profile/probes.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes between two samples on average; 0: off. */
extern _Atomic(uint64_t) heap_profile_mean __attribute__((visibility("hidden")));

/* Whether a tracer listened to the probes when the mean was last chosen. */
extern _Atomic(bool) heap_profile_listened __attribute__((visibility("hidden")));

/*
 * Once, before any function that switches the profile. cpus: how many counters, at least 1. current_cpu: the
 * number of the caller's; one that is not below cpus counts as 0. use_fast_path: whether malloc may serve
 * blocks without the profile. Any thread calls these functions, within malloc too.
 */
void heap_profile_start(unsigned cpus, unsigned (*current_cpu)(void), void (*use_fast_path)(bool use));

/* Lets the unwinder know the modules that are loaded now. Not from within malloc: takes the loader's lock. */
void heap_profile_learn_modules(void);

/*
 * Switches the profile to the mean that the program or its user has chosen, 0 for none. file_prefix: of the
 * name of the file that is written at the end, "calmalloc" if empty; read then. False if there is no memory:
 * the profile is off.
 */
bool heap_profile_configure(uint64_t mean_bytes, const char *file_prefix);

/*
 * Another process wants a sample for each so many bytes on average, or no more (0), for so many seconds (0:
 * until its next request). The program's own choice takes precedence: *in_force is the mean after the call.
 * Returns 0 or an errno: EPERM if a seccomp filter of the program may forbid the system calls that the
 * profile needs. No file is written at the end.
 */
int heap_profile_request(uint64_t mean_bytes, uint32_t seconds, uint64_t *in_force);

/* Whether a tracer has attached to the probes, or the last one has detached: heap_profile_apply is due. */
static inline bool heap_profile_should_switch(void) {
    return __builtin_expect((probe_alloc_is_enabled() || probe_free_is_enabled()) !=
                                atomic_load_explicit(&heap_profile_listened, memory_order_relaxed),
                            0);
}

/* Switches to what the program, another process or a tracer wants now: when heap_profile_should_switch says
 * so, and after filters_set. Nothing happens if the caller holds a lock of the profile. */
void heap_profile_apply(void);

/* Whether the caller holds a lock of the profile: it forks, or is a signal handler that interrupted one. */
bool heap_profile_is_locked(void);

static inline bool heap_profile_is_on(void) {
    return __builtin_expect(atomic_load_explicit(&heap_profile_mean, memory_order_relaxed) != 0, 0);
}

/* While it is on, before each allocation: whether this one is to be sampled, as a run of pages. */
bool heap_profile_should_sample(size_t size);

/* The allocation succeeded. Called from malloc's slow path, so that the stack is the caller's. */
void heap_profile_add(const void *block, size_t size);

/* A run of pages is about to be freed: before another thread may get it. */
void heap_profile_remove(const void *block);

/* Bytes of memory that the profile takes. */
size_t heap_profile_bytes(void);

/* Writes the profile so far to this file. Returns 0 or an errno; ENODATA if the profile was never on. */
int heap_profile_write(const char *path);

/* At the end of the process: writes a file of the process's own if the program or its user has chosen a
 * profile. It replaces none, follows no link, and has its name only once it is complete. */
void heap_profile_end(void);

/* Around fork, in the forking thread: the child continues its parent's profile. */
void heap_profile_before_fork(void);
void heap_profile_after_fork(void);

/* Tells a process outside how to read the profile (struct samples_layout). */
extern const struct samples_layout heap_profile_layout __attribute__((visibility("hidden")));

#endif
