/* What the C tests assert with: a failure names its line and ends the test. */
#ifndef CALM_TESTS_CHECK_H
#define CALM_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Under ThreadSanitizer, which is slow, tests of one thread are left out: it would find nothing in them. */
#if defined(__SANITIZE_THREAD__)
#define WATCHES_THREADS 1

/* It reads past a server that does not answer, as on a busy machine: what it finds is about right. */
const char *__tsan_default_suppressions(void);
__attribute__((weak)) const char *__tsan_default_suppressions(void) {
    return "race:^fill_past_server$";
}
#else
#define WATCHES_THREADS 0
#endif

/* _Exit: in a forked child, too, nothing of the parent's may be flushed or run twice. A fuzz target has
 * another way to end. */
#ifndef CHECK_FAILED
#define CHECK_FAILED() _Exit(1)
#endif

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            CHECK_FAILED();                                                 \
        }                                                                   \
    } while (0)

/* As CHECK(a == b), saying what the two were. */
#define CHECK_EQUAL(a, b)                                                                                  \
    do {                                                                                                   \
        unsigned long long check_a = (unsigned long long)(a), check_b = (unsigned long long)(b);           \
        if (check_a != check_b) {                                                                          \
            fprintf(stderr, "%s:%d: %s is %llu, not %s, which is %llu\n", __FILE__, __LINE__, #a, check_a, \
                    #b, check_b);                                                                          \
            CHECK_FAILED();                                                                                \
        }                                                                                                  \
    } while (0)

/* A value of errno, none of the system's: what is under test must not change it. */
#define KEPT_ERRNO 1234

/* Seconds to wait for what must become true, times CALM_TEST_FACTOR: many times what it takes if busy. */
#define TIMEOUT_S 300

/* The rounds of a random test: so many as usual, times CALM_TEST_FACTOR. */
static inline uint64_t check_rounds(uint64_t usual) {
    const char *asked = getenv("CALM_TEST_FACTOR");
    uint64_t factor = asked == NULL ? 1 : strtoull(asked, NULL, 10);
    CHECK(factor > 0); /* or the test would test nothing */
    return usual * factor;
}

/* A clock that no test drives. */
static inline double check_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC_RAW, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static inline void check_nap(long ns) {
    nanosleep(&(struct timespec){.tv_nsec = ns}, NULL);
}

/* Waits for what another thread or the kernel is to do. */
#define WAIT_UNTIL(condition)                                                                      \
    do {                                                                                           \
        for (double wait_end = check_seconds() + (double)check_rounds(TIMEOUT_S); !(condition);) { \
            check_nap(200000);                                                                     \
            CHECK(check_seconds() < wait_end);                                                     \
        }                                                                                          \
    } while (0)

/*
 * Where a test's random numbers begin: printed, and as CALM_TEST_SEED says, so that a run can be had again.
 * Never 0.
 */
static inline uint64_t check_seed(uint64_t usual) {
    const char *asked = getenv("CALM_TEST_SEED");
    uint64_t seed = asked == NULL ? usual : strtoull(asked, NULL, 0);
    seed = seed == 0 ? 1 : seed;
    printf("CALM_TEST_SEED=%llu\n", (unsigned long long)seed);
    fflush(stdout); /* a failed CHECK does not */
    return seed;
}

/* The next random number (xorshift). The state is never 0. */
static inline uint64_t check_random(uint64_t *drawn) {
    *drawn ^= *drawn << 13;
    *drawn ^= *drawn >> 7;
    *drawn ^= *drawn << 17;
    return *drawn;
}

/* What a test does to its process for good (a filter, a limit, a first call) ends with the child. */
static inline void in_child(void (*test)(void)) {
    fflush(NULL);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        test();
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
