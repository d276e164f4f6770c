/*
 * The identity of the process, for the files that it writes at its end, and for
 * readers of its counters. The number of a process does not identify it, since
 * processes in other PID namespaces may have this number, and the kernel uses
 * it again. The number and the start time together identify the process.
 *
 * The functions preserve errno and allocate nothing.
 */
#ifndef CALM_OS_PROCESS_H
#define CALM_OS_PROCESS_H

#include <stdint.h>

struct process {
    uint32_t number;     /* 0: not known, since an added filter may forbid the system call */
    uint32_t parent;     /* 0: not known; in process_known also 0 before the program adds a filter */
    uint64_t started_ns; /* since 1970: the start of the library, or the fork */
};

/* The process as it was at the start, at the fork, or just before the program
 * added a filter. */
extern struct process process_known __attribute__((visibility("hidden")));

/* Called at the start, and in a forked child. */
void process_begin(void);

/* Returns the process as of now. Any thread may call it. */
struct process process_now(void);

/* Called before the program adds a filter. Stores what the kernel reports now,
 * since process_now makes no system call afterwards. */
void process_remember(void);

#endif
