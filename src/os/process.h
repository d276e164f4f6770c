/*
 * Which process this is, for what it writes at its end, and for readers of its counters. Its number alone
 * does not tell: other PID namespaces have it too, and it is used again. With the time at which the process
 * began it does.
 *
 * Preserves errno; allocates nothing.
 */
#ifndef CALM_OS_PROCESS_H
#define CALM_OS_PROCESS_H

#include <stdint.h>

struct process {
    uint32_t number;     /* 0: not known, since a filter that the program added may forbid to ask */
    uint32_t parent;     /* likewise; in process_known 0 before the program adds a filter */
    uint64_t started_ns; /* since 1970: when the library started in it, or when it was forked */
};

/* As of the start, the fork, or the moment before the program added a filter. */
extern struct process process_known __attribute__((visibility("hidden")));

/* At the start, and in a forked child. */
void process_begin(void);

/* Any thread. */
struct process process_now(void);

/* Before the program adds a filter: the last time that the kernel is asked. */
void process_remember(void);

#endif
