/*
 * The thread pointer, and each thread's area for restartable sequences
 * (rseq(2)), at an offset from the thread pointer. The C library registers the
 * areas. Where it does not (glibc before 2.35, musl), each thread has an area
 * of this library's own, and registers it before its own code runs
 * (api/thread_start.c), or else when it finds its CPU's cache closed. The functions preserve errno and
 * allocate nothing.
 */
#ifndef CALM_OS_RSEQ_H
#define CALM_OS_RSEQ_H

#include "os/random.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifndef AT_RSEQ_FEATURE_SIZE /* of linux/auxvec.h, from Linux 6.3 on */
#define AT_RSEQ_FEATURE_SIZE 27
#endif

/* From linux/rseq.h. The signature is the one that glibc registers. */
#define RSEQ_CPU_ID     4
#define RSEQ_CS         8
#define RSEQ_UNREGISTER 1
#if defined(__x86_64__)
#define RSEQ_SIGNATURE 0x53053053
#else
#define RSEQ_SIGNATURE 0xd428bc00
#endif

/* Numbers of no CPU, which stand in the place of a CPU's number. The kernel and
 * glibc give the first two these values, too. */
enum rseq_no_cpu {
    RSEQ_UNREGISTERED = -1,
    RSEQ_ENDED = -2,     /* the registration has failed, or was ended */
    RSEQ_SUSPENDED = -3, /* of a child, while the kernel suspends its parent */
    RSEQ_SHARED = -4,    /* of a child, and afterwards of its parent */
};
#define RSEQ_NUMBERS 4

static inline void *thread_pointer(void) {
    void *pointer;
#if defined(__x86_64__)
    __asm__("mov %%fs:0, %0" : "=r"(pointer));
#else
    __asm__("mrs %0, tpidr_el0" : "=r"(pointer));
#endif
    return pointer;
}

/* Returns a number below `count` for the calling thread, by Fibonacci hashing
 * of its thread pointer. Several threads may have the same number. */
static inline unsigned thread_slot(unsigned count) {
    uint64_t hash = (uint64_t)(uintptr_t)thread_pointer() * RANDOM_GOLDEN_RATIO;
    return (unsigned)((hash >> 32) * count >> 32);
}

/* Offsets from the thread pointer; they are equal for all threads. A virtual
 * CPU number (mm_cid, Linux 6.3) is less than the number of CPUs, and less than
 * the number of threads of the process. Like a CPU's number, it belongs to one
 * running thread at a time. */
struct rseq_offsets {
    ptrdiff_t sequence;   /* a pointer to the descriptor of the current sequence, RSEQ_CS into the area */
    ptrdiff_t cpu_number; /* a uint32_t: the number of the virtual CPU, or else of the CPU */
    ptrdiff_t node;       /* a uint32_t; 0 if the kernel does not report nodes */
    uint32_t area_bytes;  /* as registered */
    bool usable;
    bool own; /* the areas are this library's, and a thread begins unregistered */
};

/* Finds the offsets, and registers the caller's area if it is this library's.
 * They are not usable if the kernel registers none, or if the user told glibc
 * to register none. Called once, at the start. */
struct rseq_offsets rseq_find(void);

/* Registers the caller's own area. If that fails, for example because the
 * program has registered another one, the caller's number becomes RSEQ_ENDED.
 * The registration ends with the thread. Called only if the areas are this
 * library's. */
bool rseq_register(void);

/* Ends the registration of the caller's own area. Does nothing if the program
 * has added a filter. */
void rseq_end(void);

/* Returns the offset of a thread's area, used or not; 0 if there is none. */
ptrdiff_t rseq_area_offset(void);

/* Returns whether the kernel lets this process call rseq_restart_all. Called
 * once, at the start. */
bool rseq_can_restart(void);

/*
 * Restarts every restartable sequence that runs on any CPU of this process, and
 * orders memory with it. Once it returns true, no sequence is under way that
 * began before the call. It costs an interrupt for each other CPU that runs the
 * process. Returns false if the kernel does not support it, or a filter may
 * forbid it. Any thread may call it.
 */
bool rseq_restart_all(void);

#endif
