/*
 * Differences between the C libraries that the program may run on. Any thread
 * may call these functions.
 */
#ifndef CALM_OS_LIBC_H
#define CALM_OS_LIBC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>

#ifdef __GLIBC__
#include <gnu/libc-version.h>
#endif

#define LIBC_FIRST_STRICT_MINOR 38 /* before glibc 2.38, aligned_alloc is memalign */

/* Returns whether aligned_alloc accepts this alignment, which is no power of
 * two. Older versions of glibc round it up, and musl accepts 0. All others
 * refuse it with EINVAL. */
static inline bool libc_takes_odd_alignment(size_t alignment) {
#ifdef __GLIBC__
    (void)alignment;
    const char *version = gnu_get_libc_version(); /* "2.36" */
    unsigned minor = 0;
    for (const char *digit = version + 2; *digit >= '0' && *digit <= '9'; digit++) {
        minor = minor * 10 + (unsigned)(*digit - '0');
    }
    return version[0] == '2' && minor < LIBC_FIRST_STRICT_MINOR;
#else
    return alignment == 0;
#endif
}

static inline bool is_power_of_two(size_t number) {
    return number != 0 && (number & (number - 1)) == 0;
}

#endif
