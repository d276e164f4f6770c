/*
 * Time, in nanoseconds. The kernel's shared page gives monotonic clocks without
 * a system call; the read of a CPU clock takes a system call. All code that
 * measures or waits calls this file.
 *
 * The functions are thread-safe, preserve errno, and need no thread-local
 * storage.
 */
#ifndef CALM_OS_CLOCK_H
#define CALM_OS_CLOCK_H

#include "os/filters.h"

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

#define CLOCK_NS_PER_S 1000000000U

static inline struct timespec clock_timespec(uint64_t ns) {
    return (struct timespec){(time_t)(ns / CLOCK_NS_PER_S), (long)(ns % CLOCK_NS_PER_S)};
}

/* Does what clock_gettime(2) does, by the function in the kernel's shared page.
 * A sanitizer in the program replaces the C library's function, and its
 * replacement may not be called before the sanitizer has started. */
int clock_read(clockid_t clock, struct timespec *time);

static inline uint64_t clock_read_ns(clockid_t clock) {
    struct timespec now = {0, 0};
    clock_read(clock, &now);
    return (uint64_t)now.tv_sec * CLOCK_NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline uint64_t clock_now_ns(void) {
    return clock_read_ns(CLOCK_MONOTONIC);
}

/* Returns whether more than `ns` have passed since the first call. *start is 0
 * at the first call. */
static inline bool clock_has_passed(uint64_t *start, uint64_t ns) {
    uint64_t now = clock_now_ns();
    *start = *start == 0 ? now : *start;
    return now - *start > ns;
}

/* A stopwatch measures the CPU time of the calling thread. If a filter may
 * forbid that system call, it measures elapsed time. */
struct stopwatch {
    clockid_t clock;
    uint64_t start_ns;
};

static inline struct stopwatch stopwatch_start(void) {
    clockid_t clock = filters_now() == FILTERS_ADDED ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
    return (struct stopwatch){clock, clock_read_ns(clock)};
}

/* Returns the time since the start. Only the thread that started the watch may
 * call it. Returns 0 if another thread has added a filter since the start. */
static inline uint64_t stopwatch_ns(const struct stopwatch *watch) {
    bool may_read = watch->clock == CLOCK_MONOTONIC || filters_now() != FILTERS_ADDED;
    return may_read ? clock_read_ns(watch->clock) - watch->start_ns : 0;
}

/* Returns the time to within a few milliseconds, at a quarter of the cost. */
static inline uint64_t clock_coarse_ns(void) {
    return clock_read_ns(CLOCK_MONOTONIC_COARSE);
}

/* Returns now - then, or 0 if another thread read `then` after this thread had
 * read `now`. */
static inline uint64_t clock_elapsed_ns(uint64_t now, uint64_t then) {
    return now > then ? now - then : 0;
}

#endif
