/* What the C tests assert with: a failure names its line and ends the test. */
#ifndef CALM_TESTS_CHECK_H
#define CALM_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

/* _Exit: in a forked child, too, nothing of the parent's may be flushed or run twice. */
#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
            _Exit(1);                                                       \
        }                                                                   \
    } while (0)

/* As CHECK(a == b), saying what the two were. */
#define CHECK_EQUAL(a, b)                                                                                  \
    do {                                                                                                   \
        unsigned long long check_a = (unsigned long long)(a), check_b = (unsigned long long)(b);           \
        if (check_a != check_b) {                                                                          \
            fprintf(stderr, "%s:%d: %s is %llu, not %s, which is %llu\n", __FILE__, __LINE__, #a, check_a, \
                    #b, check_b);                                                                          \
            _Exit(1);                                                                                      \
        }                                                                                                  \
    } while (0)

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
