/*
 * The heap profile: which allocations are sampled, and when. The other files of
 * this folder are its parts. The allocator's entry points call only this file,
 * through api/features.h, since the feature is optional.
 *
 * While the profile is off, it costs malloc and free nothing. Switching it on
 * disables malloc's fast path (use_fast_path). Each malloc then takes the slow
 * path, in which it counts its bytes down to the next sample, with one counter
 * for each CPU. A sampled block is a run of pages, whatever its size. Only the
 * free of a run therefore needs to ask whether the block was sampled.
 *
 * The functions are thread-safe, preserve errno and allocate nothing. One lock
 * serializes switching. The table of samples has its own lock, which a thread
 * acquires after the first one. A thread that holds either acquires no other
 * lock.
 */
#ifndef CALM_PROFILE_HEAP_PROFILE_H
#define CALM_PROFILE_HEAP_PROFILE_H

#include "profile/sample_probes.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes between two samples on average; 0: off. */
extern _Atomic(uint64_t) heap_profile_mean __attribute__((visibility("hidden")));

/* Whether a tracer listened to the probes when the mean was last chosen. */
extern _Atomic(bool) heap_profile_listened __attribute__((visibility("hidden")));

/*
 * Sets up the profile. Called once, before any function that switches the
 * profile. `cpus` is the number of counters, at least 1. `current_cpu` returns
 * the number of the calling thread's counter; a number that is not below `cpus`
 * counts as 0. `use_fast_path` is told whether malloc may serve blocks without
 * the profile. The profile calls `current_cpu` and `use_fast_path` in any
 * thread, also within malloc.
 */
void heap_profile_start(unsigned cpus, unsigned (*current_cpu)(void), void (*use_fast_path)(bool use));

/* Makes the unwinder read which modules are loaded now. Takes the loader's
 * lock, and so must not be called within malloc. */
void heap_profile_learn_modules(void);

/*
 * Switches the profile to the mean that the program or its user has chosen, 0
 * for none. `file_prefix` begins the name of the file that is written at the
 * end; "calmalloc" if it is empty. It is read only then. Returns false if there
 * is no memory; the profile is then off.
 */
bool heap_profile_configure(uint64_t mean_bytes, const char *file_prefix);

/*
 * Switches the profile on behalf of another process. That process requests one
 * sample in `mean_bytes` bytes on average; 0 requests none. The request lasts
 * `seconds` seconds (0: until its next request). The program's own choice takes
 * precedence. `*in_force` is the mean after the call. No file is written at the
 * end.
 *
 * Returns 0 or an errno: EPERM if a seccomp filter of the program may forbid
 * the system calls that the profile needs.
 */
int heap_profile_request(uint64_t mean_bytes, uint32_t seconds, uint64_t *in_force);

/* Returns whether a tracer has attached to the probes, or the last one has
 * detached. The caller then calls heap_profile_apply. */
static inline bool heap_profile_should_switch(void) {
    return __builtin_expect((probe_alloc_is_enabled() || probe_free_is_enabled()) !=
                                atomic_load_explicit(&heap_profile_listened, memory_order_relaxed),
                            0);
}

/* Switches to the mean that the program, another process or a tracer wants now.
 * Called if heap_profile_should_switch returns true, and after filters_set.
 * Does nothing if the calling thread holds a lock of the profile. */
void heap_profile_apply(void);

/* Returns whether the calling thread holds a lock of the profile. It does while
 * it forks, and in a signal handler that interrupted the profile. */
bool heap_profile_is_locked(void);

static inline bool heap_profile_is_on(void) {
    return __builtin_expect(atomic_load_explicit(&heap_profile_mean, memory_order_relaxed) != 0, 0);
}

/* Returns whether an allocation is to be sampled, as a run of pages. While the
 * profile is on, it is called before each allocation. */
bool heap_profile_should_sample(size_t size);

/* Adds the allocated block to the profile. The caller is malloc's slow path, so
 * that the recorded stack is that of malloc's caller. */
void heap_profile_add(const void *block, size_t size);

/* Called before a run of pages is freed, and so before another thread may get
 * it. */
void heap_profile_remove(const void *block);

/* Returns the bytes of memory that the profile takes. */
size_t heap_profile_bytes(void);

/* Writes the profile so far to this file. Returns 0 or an errno; ENODATA if the
 * profile was never on. */
int heap_profile_write(const char *path);

/* Writes a file of the process's own at its end, if the program or its user has
 * chosen a profile. The file replaces none, follows no link, and has its name
 * only once it is complete. */
void heap_profile_end(void);

/* The forking thread calls these around fork. The child continues its parent's
 * profile. */
void heap_profile_before_fork(void);
void heap_profile_after_fork(void);

/* Describes to other processes how to read the profile. */
extern const struct samples_layout heap_profile_layout __attribute__((visibility("hidden")));

#endif
