/*
 * Time, in nanoseconds, from the kernel's shared page: monotonic clocks without a system call, CPU clocks
 * with one. Called by everything that measures or waits. Thread-safe; preserves errno; needs no thread-local
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

/* clock_gettime(2) from the kernel's shared page. Not the C library's: a sanitizer in the program replaces
 * that, and is not ready for a call before the program is. */
int clock_read(clockid_t clock, struct timespec *time);

static inline uint64_t clock_read_ns(clockid_t clock) {
    struct timespec now = {0, 0};
    clock_read(clock, &now);
    return (uint64_t)now.tv_sec * CLOCK_NS_PER_S + (uint64_t)now.tv_nsec;
}

static inline uint64_t clock_now_ns(void) {
    return clock_read_ns(CLOCK_MONOTONIC);
}

/* Whether more than so much time has passed since the first call, at which *start is 0. */
static inline bool clock_has_passed(uint64_t *start, uint64_t ns) {
    uint64_t now = clock_now_ns();
    *start = *start == 0 ? now : *start;
    return now - *start > ns;
}

/* Measures the CPU time of the calling thread; elapsed time where a filter may forbid the system call. */
struct stopwatch {
    clockid_t clock;
    uint64_t start_ns;
};

static inline struct stopwatch stopwatch_start(void) {
    clockid_t clock = filters_now() == FILTERS_ADDED ? CLOCK_MONOTONIC : CLOCK_THREAD_CPUTIME_ID;
    return (struct stopwatch){clock, clock_read_ns(clock)};
}

/* Since the start, on the thread that started it. 0 if another thread has added a filter since. */
static inline uint64_t stopwatch_ns(const struct stopwatch *watch) {
    bool may_read = watch->clock == CLOCK_MONOTONIC || filters_now() != FILTERS_ADDED;
    return may_read ? clock_read_ns(watch->clock) - watch->start_ns : 0;
}

/* To a few milliseconds, for a quarter of the cost. */
static inline uint64_t clock_coarse_ns(void) {
    return clock_read_ns(CLOCK_MONOTONIC_COARSE);
}

/* now - then, or 0 if another thread read `then` after this thread read `now`. */
static inline uint64_t clock_elapsed_ns(uint64_t now, uint64_t then) {
    return now > then ? now - then : 0;
}

#endif
