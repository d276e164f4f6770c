/*
 * A bare thread: the kernel's, without the C library's. What it runs must not call anything that needs the C
 * library's thread, such as errno. Also what such a thread gives up of what it inherited, and whether the
 * program has other threads.
 *
 * Called by the helper thread of the governor and by the server of offload mode. Preserves errno.
 */
#ifndef CALM_OS_THREAD_H
#define CALM_OS_THREAD_H

#include "os/cpus.h"
#include "os/filters.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* All zero at first. Its stack is kept, for the next thread that starts in its place. */
struct thread {
    _Atomic(uint32_t) id;      /* the kernel's; 0 when there is none, and the stack is not used any more */
    _Atomic(uint32_t) last_id; /* of the last that was started, which may exist a moment longer */
    char *memory;
    void (*body)(void *argument); /* what it runs */
    void *argument;
};

/* The number of callers that hold back the start of bare threads, because the process is about to change its
 * privileges. */
extern _Atomic(uint32_t) thread_start_holds __attribute__((visibility("hidden")));

/*
 * Runs body(argument) in a thread with all signals blocked, on a stack of its own, and with a block of zeros
 * where thread-local storage would be. False if the kernel refuses. stack_bytes is the same each time. Only
 * while thread_is_gone, by one caller at a time. Allocates address space only.
 */
bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes);

static inline bool thread_is_gone(const struct thread *thread) {
    return atomic_load_explicit(&thread->id, memory_order_acquire) == 0;
}

/* Sleeps until it is gone, at most for ns; 0 ns: without a limit. May return early. */
void thread_wait(struct thread *thread, uint64_t ns);

/* Once it is gone: waits until the kernel does not count it among the process's threads any more, at most for
 * ns. */
void thread_wait_uncounted(struct thread *thread, uint64_t ns);

/* In a forked child, which has no thread of the parent's but the one that forked. */
void thread_forget(struct thread *thread);

/* ---- what the calling thread gives up ---- */

/*
 * Blocks signals for the calling thread: all but the one by which setuid(2) and its relatives have each
 * thread change its credentials. The thread that sends it waits for all others, and may hold a lock that the
 * caller is about to wait for. Returns the mask of before, for thread_set_signals.
 */
uint64_t thread_block_signals(void);
uint64_t thread_set_signals(uint64_t mask);

/*
 * From now on the calling thread has a table of open files of its own, an empty one: what it opens takes no
 * number that the program counts on, and nothing of the program's stays open because of it. False where the
 * kernel cannot (before Linux 5.9).
 */
bool thread_leave_files(void);

/* From now on the calling thread has no capabilities, whatever its user. */
void thread_drop_capabilities(void);

/* From now on the calling thread is no real-time thread, and may run on these CPUs (any, if the set is
 * empty), whatever it inherited from the thread that started it. */
void thread_schedule_normally(const struct cpu_set *cpus);

/* ---- the program's threads ---- */

/* Where the C library says whether it knows of no other thread than the caller: set once, at the start, where
 * it does (glibc 2.32). Its name is not used here, for libraries that run with older ones. */
extern const char *thread_alone __attribute__((visibility("hidden")));
extern const char thread_not_alone __attribute__((visibility("hidden"))); /* a byte that never says so */

static inline bool thread_is_alone(void) {
    return *thread_alone != 0;
}

/* Whether a thread of the program's may open a file after the start: no other thread can close it by mistake
 * or miss its number, and no filter kills the process for it. */
static inline bool thread_may_open_files(void) {
    return thread_is_alone() && filters_now() != FILTERS_ADDED;
}

/* Threads of this process, as /proc counts them; 0 if it does not say. Opens a file. */
unsigned thread_count(void);

#endif
