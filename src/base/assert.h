/*
 * Assertions, which state what must hold. Builds with CALM_ASSERTIONS (CMake:
 * CALMALLOC_ASSERTIONS) check them. Other builds compile them, but they
 * generate no code.
 *
 *     calm_assert(condition, values ...)
 *
 * A failure prints the file, the line, the condition and up to four values,
 * which are integers or pointers, and aborts. Allocates nothing. Any thread and
 * any signal handler may call it.
 */
#ifndef CALM_BASE_ASSERT_H
#define CALM_BASE_ASSERT_H

#include <stddef.h>
#include <stdint.h>

/* Defined in os/assert.c. names: the texts of the values, separated by
 * commas. */
_Noreturn void assert_fail(const char *file, int line, const char *condition, const char *names,
                           const uint64_t *values, size_t count);

#define ASSERT_NUMBER(value)         (uint64_t)(uintptr_t)(value)
#define ASSERT_NUMBERS_0()           0
#define ASSERT_NUMBERS_1(a)          ASSERT_NUMBER(a)
#define ASSERT_NUMBERS_2(a, b)       ASSERT_NUMBER(a), ASSERT_NUMBER(b)
#define ASSERT_NUMBERS_3(a, b, c)    ASSERT_NUMBERS_2(a, b), ASSERT_NUMBER(c)
#define ASSERT_NUMBERS_4(a, b, c, d) ASSERT_NUMBERS_3(a, b, c), ASSERT_NUMBER(d)

#define ASSERT_SIXTH(a, b, c, d, e, f, ...) f
#define ASSERT_COUNT(...)                   ASSERT_SIXTH(0, ##__VA_ARGS__, 4, 3, 2, 1, 0)
#define ASSERT_JOIN(a, b)                   a##b
#define ASSERT_NUMBERS(count, ...)          ASSERT_JOIN(ASSERT_NUMBERS_, count)(__VA_ARGS__)

/* text: the condition, before the compiler replaces macros in it. */
#define ASSERT_THAT(text, condition, ...)                                                                    \
    ((condition) ? (void)0                                                                                   \
                 : assert_fail(__FILE__, __LINE__, text, "" #__VA_ARGS__,                                    \
                               (const uint64_t[]){ASSERT_NUMBERS(ASSERT_COUNT(__VA_ARGS__), ##__VA_ARGS__)}, \
                               ASSERT_COUNT(__VA_ARGS__)))

/* Checks in each build, for functions whose purpose is to check. */
#define calm_check(condition, ...) ASSERT_THAT(#condition, condition, ##__VA_ARGS__)

#ifdef CALM_ASSERTIONS
#define calm_assert(condition, ...) ASSERT_THAT(#condition, condition, ##__VA_ARGS__)
#else
/* sizeof evaluates nothing, but the names in the condition count as used. */
#define calm_assert(condition, ...) ((void)sizeof((condition) ? 1 : 0))
#endif

#endif
