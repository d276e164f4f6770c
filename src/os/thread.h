/* A bare thread: the kernel's, without the C library's. */
#ifndef CALM_OS_THREAD_H
#define CALM_OS_THREAD_H

#include "os/cpu_usage.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* All zero at first. Its stack is kept, for the next thread that starts in its place. */
struct thread {
    _Atomic(uint32_t) id;      /* the kernel's; 0 when there is none, and the stack is not used any more */
    _Atomic(uint32_t) last_id; /* of the last that was started, which may be there a moment longer */
    char *memory;
};

/* How many want that no thread of ours is started, as the process is about to change what it may do. */
extern _Atomic(uint32_t) thread_stops __attribute__((visibility("hidden")));

/*
 * Runs body(argument) in a thread with all signals blocked, on a stack of its own, and with a block
 * of zeros where thread-local storage would be: body must not call what needs the C library's
 * thread. False if the kernel refuses. stack_bytes is the same each time. Only while thread_is_gone, by one
 * caller at a time. Preserves errno; allocates address space only.
 */
bool thread_start(struct thread *thread, void (*body)(void *argument), void *argument, size_t stack_bytes);

/* Blocks all signals for the calling thread. Returns the mask of before, for thread_restore_signals. */
uint64_t thread_block_signals(void);
void thread_restore_signals(uint64_t mask);

static inline bool thread_is_gone(const struct thread *thread) {
    return atomic_load_explicit(&thread->id, memory_order_acquire) == 0;
}

/* Sleeps until it is gone, at most so long; 0 ns: for as long as it takes. May return early. */
void thread_wait(struct thread *thread, uint64_t ns);

/* Where the C library says whether it knows of no other thread than the caller: set once, at the start, where
 * it does (glibc 2.32); the name is not asked for here, for libraries that run with older ones. */
extern const char *thread_alone __attribute__((visibility("hidden")));

static inline bool thread_is_alone(void) {
    return *thread_alone != 0;
}

/* Once it is gone: waits until the kernel does not count it among the process's threads any more, at most so
 * long. */
void thread_wait_uncounted(struct thread *thread, uint64_t ns);

/* Threads of this process, as /proc counts them; 0 if it does not say. Opens a file meanwhile. */
unsigned thread_count(void);

/* In a forked child, where no thread of the parent's is but the one that forked. */
void thread_forget(struct thread *thread);

/*
 * From now on the calling thread has a table of open files of its own, an empty one: what it opens takes no
 * number that the program counts on, and nothing of the program's stays open because of it. False where the
 * kernel cannot (before Linux 5.9).
 */
bool thread_leave_files(void);

/* From now on the calling thread has no capabilities, whatever its user. */
void thread_drop_capabilities(void);

/* From now on the calling thread is no real-time thread, and may use these CPUs, whatever it inherited from
 * the thread that started it. */
void thread_schedule_normally(const struct cpu_mask *mask);

#endif
