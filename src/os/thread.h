/*
 * Bare threads: threads of the kernel without the C library's part. A bare
 * thread must not call a function that needs the C library's thread, for
 * example through errno. This file also has the functions by which such a
 * thread gives up what it inherited, and the question whether the program has
 * other threads.
 *
 * The arena's helper thread is a bare thread.
 * The functions preserve errno.
 */
#ifndef CALM_OS_THREAD_H
#define CALM_OS_THREAD_H

#include "os/cpus.h"
#include "os/filters.h"
#include "os/signals.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A bare thread. All zero is the initial state. The stack stays, for the next
 * thread that starts here. */
struct thread {
    _Atomic(uint32_t) id;      /* the kernel's number of the thread; 0: no thread uses the stack */
    _Atomic(uint32_t) last_id; /* the last thread that started here, which may outlive id for a moment */
    char *memory;
    void (*body)(void *argument); /* the function that the thread runs */
    void *argument;
};

/* The number of callers that hold back the start of bare threads, because the
 * process is about to change its privileges. */
extern _Atomic(uint32_t) thread_start_holds __attribute__((visibility("hidden")));

/*
 * Runs body(argument) in a bare thread. All signals are blocked in it. It has a
 * stack of its own, and a block of zeros in place of thread-local storage.
 * Returns false if the kernel refuses. stack_bytes must be equal in all calls
 * for a thread. One caller at a time may call it, and only while
 * thread_is_gone. Allocates only address space.
 */
bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes);

static inline bool thread_is_gone(const struct thread *thread) {
    return atomic_load_explicit(&thread->id, memory_order_acquire) == 0;
}

/* Sleeps until the thread is gone, for at most `ns`; 0 ns means without a
 * limit. May return early. */
void thread_wait(struct thread *thread, uint64_t ns);

/* Waits, after the thread is gone, until the kernel no longer counts it among
 * the process's threads, for at most `ns`. */
void thread_wait_uncounted(struct thread *thread, uint64_t ns);

/* Forgets the thread in a forked child. Of the parent's threads, the child has
 * only the one that forked. */
void thread_forget(struct thread *thread);

/* ---- what the calling thread gives up ---- */

/* Gives the calling thread an empty table of open files of its own. Descriptors
 * that the thread opens then take no number that the program expects, and the
 * thread keeps no file of the program open. Returns false if the kernel does
 * not support it (before Linux 5.9). */
bool thread_leave_files(void);

/* Takes all capabilities from the calling thread, whatever its user is. */
void thread_drop_capabilities(void);

/* Ends real-time scheduling of the calling thread, and lets it run on these
 * CPUs (on any, if the set is empty). The thread may have inherited other
 * settings from the thread that started it. */
void thread_schedule_normally(const struct cpu_set *cpus);

/* ---- the program's threads ---- */

/* Points to the byte by which the C library says whether it knows only one
 * thread. It is set once, at the start, if the C library has such a byte (glibc
 * 2.32). This file does not use the byte's name, because libraries must run
 * with older versions, too. */
extern const char *thread_single __attribute__((visibility("hidden")));
extern const char thread_not_single __attribute__((visibility("hidden"))); /* a byte that always says no */

static inline bool thread_is_single(void) {
    return *thread_single != 0;
}

/* Returns whether a thread of the program may open a file after the start. If
 * so, no other thread can close the file by mistake or miss its number, and no
 * filter kills the process for it. */
static inline bool thread_may_open_files(void) {
    return thread_is_single() && filters_now() != FILTERS_ADDED;
}

/* Returns the number of threads of this process in /proc, or 0 if it is not
 * known. Opens a file. */
unsigned thread_count(void);

#endif
