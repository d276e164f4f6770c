/*
 * System calls without the C library's wrappers. They return -errno and touch
 * no thread-local storage. They therefore preserve the program's errno, and
 * bare threads (thread.h) can make them.
 */
#ifndef CALM_OS_SYSCALL_H
#define CALM_OS_SYSCALL_H

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>

/* Makes a system call with this number and up to six arguments, integers or
 * pointers. */
#define os_syscall(...) OS_SYSCALL_OF(__VA_ARGS__, 0, 0, 0, 0, 0, 0, 0)
#define OS_SYSCALL_OF(number, a, b, c, d, e, f, ...) \
    os_syscall_6(number, (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

static inline long os_syscall_6(long number, long a, long b, long c, long d, long e, long f) {
#if defined(__x86_64__)
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
#elif defined(__aarch64__)
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
#else
#error "calmalloc runs on x86-64 and aarch64"
#endif
}

/* Converts a result for functions that have the C library's names: -errno
 * becomes -1, with errno set. */
static inline long libc_result(long result) {
    if (result < 0 && result >= -4095) {
        errno = (int)-result;
        return -1;
    }
    return result;
}

#endif
