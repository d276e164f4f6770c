/*
 * The heap profile of the process: which allocations are sampled, and when.
 *
 * Off, it costs malloc and free nothing: it is on that takes the fast path of malloc away, by a table of size
 * classes that says 0, "none", of each size (allocator.c). Each malloc then comes the slow way and counts its
 * bytes down to the next sample, one counter for each CPU. A sampled block is a run of pages, whatever its
 * size, so that of all frees only that of a run has to ask whether the block was sampled.
 */
#ifndef CALM_API_PROFILING_H
#define CALM_API_PROFILING_H

#include "profile/probes.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes between samples on average; 0: off. Read by the slow paths. */
extern _Atomic(uint64_t) profiling_mean __attribute__((visibility("hidden")));

static inline bool profiling_is_on(void) {
    return __builtin_expect(atomic_load_explicit(&profiling_mean, memory_order_relaxed) != 0, 0);
}

/* As it was when the mean was last chosen. */
extern _Atomic(bool) profiling_listened __attribute__((visibility("hidden")));

static inline bool profiling_has_listener(void) {
    return probe_alloc_is_heard() || probe_free_is_heard();
}

/* Whether a tracer has attached to the profile's probes, or the last one is gone, since then. */
static inline bool profiling_should_switch(void) {
    return __builtin_expect(
        profiling_has_listener() != atomic_load_explicit(&profiling_listened, memory_order_relaxed), 0);
}

/* Switches to what the option says, another process asks for, or tracers listen for. False, and off, if there
 * is no memory for it. */
bool profiling_apply(void);

/*
 * Another process wants the heap to be sampled, each so many bytes on average, or no more (0), and for so
 * many seconds (0: until it asks again). An option of the program's goes before it. 0 or an errno: EPERM if a
 * seccomp filter may not know what that takes. No file is written at exit.
 */
int profiling_ask(uint64_t mean, uint32_t seconds);

/* Whether the caller holds a lock of the profile: a signal handler that interrupted it, or in a fork. */
bool profiling_is_held(void);

/* The program is about to add a seccomp filter, and filters_now says so. */
void profiling_before_filter(void);

/* While it is on, of each block: whether to sample it. */
bool profiling_counts(size_t size);

/* A sampled block is there. */
void profiling_note(const void *block, size_t size);

/* A run of pages is about to be freed. */
void profiling_forget(const void *block);

/* Bytes of memory that the profile takes. */
size_t profiling_bytes(void);

/* How a process outside reads it. */
extern const struct samples_layout profiling_layout __attribute__((visibility("hidden")));

/* 0 or an errno; ENODATA if profiling was never on. */
int profiling_write(const char *path);

/* At the process's end: writes the profile that the program or its user asked for. */
void profiling_write_at_exit(void);

void profiling_before_fork(void);
void profiling_after_fork(void);

#endif
