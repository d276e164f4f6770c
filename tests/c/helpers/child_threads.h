/* For tests whose forked children start threads, which ThreadSanitizer must be told. */
#ifndef CALM_TESTS_CHILD_THREADS_H
#define CALM_TESTS_CHILD_THREADS_H

#include <pthread.h>

#include "check.h"

#if WATCHES_THREADS
const char *__tsan_default_options(void);
__attribute__((weak)) const char *__tsan_default_options(void) {
    return "die_after_fork=0:atexit_sleep_ms=10";
}

/* Not on the stacks of the parent's threads: by these ThreadSanitizer knows a thread. */
static inline void start_threads_elsewhere(void) {
    pthread_attr_t attributes;
    size_t bytes;
    CHECK(pthread_getattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_getstacksize(&attributes, &bytes) == 0);
    CHECK(pthread_attr_setstacksize(&attributes, 2 * bytes) == 0);
    CHECK(pthread_setattr_default_np(&attributes) == 0);
    CHECK(pthread_attr_destroy(&attributes) == 0);
}
#else
static inline void start_threads_elsewhere(void) {
}
#endif

#endif
